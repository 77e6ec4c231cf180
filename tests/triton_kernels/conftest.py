"""Triton kernels run on a GPU, or on the CPU through Triton's interpreter, and nowhere else."""

from pathlib import Path

import pytest
import torch

from tests.support import lanes


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Skip the whole folder where Triton, which its files import, is not installed."""
    pytest.importorskip("triton", reason="Triton kernels need triton: not installed")


@pytest.fixture(autouse=True)
def kernels_can_run(device: torch.device) -> None:
    if device.type == "cpu" and not lanes.is_interpreted():
        pytest.skip("Triton kernels need a GPU (--device cuda) or TRITON_INTERPRET=1")


@pytest.fixture(params=["narrow", "wide"])
def addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with 32-bit addresses, and again as if every tensor were too large for them."""
    from torchembed.triton_kernels import row_blocks

    if request.param == "wide":
        monkeypatch.setattr(row_blocks, "NARROW_LIMIT", 0)
    return request.param
