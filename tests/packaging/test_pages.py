"""The pages say what is so."""

import re
from pathlib import Path

from tests.packaging.source_tree import ROOT

PYTHON_FOLDERS = ("torchembed", "triton_kernels", "recipes", "bench", "tests")
NAME = r"TORCHEMBED_[A-Z][A-Z_]*[A-Z]"


def test_every_environment_variable_is_listed() -> None:
    used = set(re.findall(rf"\b{NAME}\b", (ROOT / "Makefile").read_text()))
    for folder in PYTHON_FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            used.update(re.findall(rf"\b{NAME}\b", path.read_text()))
    for path in filter(Path.is_file, (ROOT / "csrc").rglob("*")):
        # Macros have such names too: only what is read from the environment counts.
        used.update(re.findall(rf'getenv\("({NAME})"\)', path.read_text()))
    assert used == set(re.findall(rf"\b{NAME}\b", (ROOT / "ENVS.md").read_text()))
