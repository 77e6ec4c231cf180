"""Tensors of the device over host memory are that memory."""

import gc

import pytest
import torch

from tests.support.clicks import import_torchrec
from torchembed.tables.tiers import host_tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_the_memory_that_it_is_of(device: torch.device, dtype: torch.dtype) -> None:
    import_torchrec()
    from torchembed.integrations.torchrec.tables.device_view import device_view

    stored = host_tensor((6, 4), dtype, device).fill_(1)
    view = device_view(stored[2:4], device)
    assert (view.device.type, view.dtype, view.shape) == (device.type, dtype, (2, 4))
    view[1] = 2
    if device.type == "cuda":
        torch.cuda.synchronize()
    expected = torch.tensor([1, 1, 1, 2, 1, 1], dtype=dtype)
    assert torch.equal(stored[:, 0], expected)
    del stored
    gc.collect()
    assert torch.equal(view.cpu()[:, 3], expected[2:4])


def test_an_empty_view_is_one(device: torch.device) -> None:
    import_torchrec()
    from torchembed.integrations.torchrec.tables.device_view import device_view

    view = device_view(host_tensor((0, 4), torch.float32, device), device)
    assert (view.device.type, view.shape) == (device.type, (0, 4))
