"""The checkout that the tests run in, and commands run on copies of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SOURCES = (
    *("torchembed", "triton_kernels", "csrc"),
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"),
)
"""The files that the distribution is built from."""


def copy_sources(folder: Path) -> Path:
    """Copy what the distribution is built from, links kept, without anything built."""
    folder.mkdir()
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=built)
        else:
            shutil.copy(source, folder / name)
    return folder


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in ``cwd``; what ``environment`` names is set, and lanes are not.

    The C++ library is the caller's, since the sanitizers of that one are loaded there too.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name == "TORCHEMBED_LIBRARY" or not name.startswith(("TORCHEMBED_", "TRITON_", "PYTHON"))
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_python_or_fail(*arguments: str, cwd: Path, **environment: str) -> str:
    """The standard output of a run that must succeed."""
    run = run_python(*arguments, cwd=cwd, **environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
