"""Modules that importing torchembed needs, and names that nobody may import."""

import ast

import pytest

from tests.support.source_tree import ROOT, run_python_or_fail

OPTIONAL = (
    *("triton", "torchrec", "fbgemm_gpu", "torchmetrics", "matplotlib"),
    *("polars", "pyarrow", "tqdm", "tyro", "sklearn", "rocksdict"),
    *("upath", "s3fs"),
)


def test_import_needs_torch_and_numpy_alone() -> None:
    program = f"""
import sys

import torch

# None makes an import fail, as where the module is not installed.
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import torchembed.doctor
import torchembed.stores

torchembed.doctor.picked_kernels()
"""
    run_python_or_fail("-W", "ignore", "-c", program, cwd=ROOT, OMP_NUM_THREADS="1")


def imported_names(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", ["torchembed", "triton_kernels", "recipes", "bench", "tests"])
def test_nobody_imports_the_bare_triton_kernels(folder: str) -> None:
    """It is torchembed.triton_kernels; a distribution of another project has the bare name."""
    texts = {path: path.read_text() for path in (ROOT / folder).rglob("*.py")}
    guilty = [
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if "triton_kernels" in text  # few have it, and parsing takes long
        and any(name.partition(".")[0] == "triton_kernels" for name in imported_names(text))
    ]
    assert guilty == []
