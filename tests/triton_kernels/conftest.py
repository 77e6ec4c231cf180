"""Triton kernels run on a GPU, or on the CPU through Triton's interpreter, and nowhere else."""

import pytest
import torch

from tests import lanes


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
