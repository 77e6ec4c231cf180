"""Runs a TorchRec script with torchembed's sharders and pipeline installed.

``torchrun ... -m torchembed.integrations.torchrec.run script.py arguments`` is
``torchrun ... script.py arguments`` after :func:`install`; ``-m module`` runs a module.
``--keep-pipeline`` before them leaves TorchRec's pipeline.
"""

import os
import runpy
import sys

from torchembed.integrations.torchrec.install import install

USAGE = (
    "usage: python -m torchembed.integrations.torchrec.run [--keep-pipeline] "
    "(script.py | -m module) [arguments]"
)


def run(arguments: list[str]) -> None:
    """Run ``arguments``: ``--keep-pipeline`` or not, a script's path or ``-m`` and a module, then
    its own arguments."""
    keeps_pipeline = arguments[:1] == ["--keep-pipeline"]
    arguments = arguments[1:] if keeps_pipeline else arguments
    is_module = arguments[:1] == ["-m"]
    sys.argv = arguments[1:] if is_module else arguments
    if not sys.argv or sys.argv[0].startswith("-"):
        raise SystemExit(USAGE)
    install(pipeline=not keeps_pipeline)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        # The interpreter does this too, so that a script can import modules of its folder.
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
