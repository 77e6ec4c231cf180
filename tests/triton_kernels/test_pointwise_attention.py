"""Kernels of ``pointwise_attention``: the example of the sums over diagonals, and addresses."""

import torch
import triton
import triton.language as tl

from tests.support.tolerance import assert_same_bits
from tests.support.values import whole
from torchembed.ops.pointwise_attention import reference
from torchembed.triton_kernels import pointwise_attention
from torchembed.triton_kernels.pointwise_attention import _sums_over_diagonals


@triton.jit
def _sums_over_diagonals_kernel(tile_ptr, out_ptr, BLOCK: tl.constexpr):
    within = tl.arange(0, BLOCK)
    tile = tl.load(tile_ptr + within[:, None] * BLOCK + within[None, :])
    lower, upper = _sums_over_diagonals(tile, BLOCK)
    tl.store(out_ptr + within, lower)
    tl.store(out_ptr + BLOCK + within, upper)


def test_sums_over_diagonals(device: torch.device) -> None:
    tile, out = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device), torch.zeros(4, device=device)
    _sums_over_diagonals_kernel[(1,)](tile, out, BLOCK=2)
    assert out.tolist() == [5, 3, 0, 2]
    tile, out = whole(16, 16, seed=0, device=device), torch.zeros(32, device=device)
    _sums_over_diagonals_kernel[(1,)](tile, out, BLOCK=16)
    lower = [tile.diagonal(-d).sum() for d in range(16)]
    upper = [0, *(tile.diagonal(16 - d).sum() for d in range(1, 16))]
    assert out.tolist() == [*lower, *upper]


def test_narrow_and_wide_addresses(addresses: str, device: torch.device) -> None:
    grad, *rows = whole(4, 7, 2, 4, seed=0, device=device)
    # The sigmoid of such large scores is 1, so that all numbers are whole, or quarters.
    biases = torch.full((4,), 200.0, device=device)
    given = (*rows, torch.tensor([0, 5, 6], device=device), biases, None, None, None)
    assert_same_bits(
        pointwise_attention.launch_pointwise_attention_forward(*given),
        reference.pointwise_attention_forward_reference(*given),
    )
    found = pointwise_attention.launch_pointwise_attention_backward(grad, *given)
    expected = reference.pointwise_attention_backward_reference(grad, *given)
    for actual, exact in zip(found, expected, strict=True):
        assert actual.tolist() == exact.tolist()
