"""Runs a notebook and stores its outputs: ``python -m tests.support.notebook PATH``, for each that
was changed. In a process of its own, since the client of the kernel leaves sockets open.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_notebook(path: Path) -> None:
    """Run the notebook at ``path`` in a folder that is removed, and write it back."""
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        # Sockets are files there, in place of ports.
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        NotebookClient(
            notebook,
            km=kernel,
            timeout=600,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    run_notebook(Path(sys.argv[1]))
