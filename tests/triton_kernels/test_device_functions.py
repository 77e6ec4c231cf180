"""Random bits and roundings inside kernels have the bits that the specification gives."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.tolerance import assert_same_bits
from torchembed.core import random_bits as specification
from torchembed.ops.rowwise_update import reference
from torchembed.triton_kernels.random_bits import random_bits
from torchembed.triton_kernels.rounding import as_float32, round_to_nearest, stochastic_round


@triton.jit
def _random_bits_kernel(keys_ptr, counters_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    bits = random_bits(tl.load(keys_ptr + index), tl.load(counters_ptr + index))
    tl.store(out_ptr + index, bits.to(tl.int64, bitcast=True))


def test_random_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63)])
    keys, counters = (
        torch.cat([ends.roll(shift), torch.randint(-(2**62), 2**62, (59,), generator=generator)])
        for shift in (0, 2)
    )
    out = torch.zeros(64, dtype=torch.int64, device=device)
    _random_bits_kernel[(1,)](keys.to(device), counters.to(device), out, BLOCK=64)
    assert_same_bits(out, specification.random_bits(keys, counters))


@triton.jit
def _stochastic_round_kernel(values_ptr, random_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    random = tl.load(random_ptr + index).to(tl.uint64, bitcast=True)
    rounded = stochastic_round(tl.load(values_ptr + index), random, out_ptr.dtype.element_ty)
    tl.store(out_ptr + index, rounded)


@triton.jit
def _round_to_nearest_kernel(values_ptr, random_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        out_ptr + index, round_to_nearest(tl.load(values_ptr + index), out_ptr.dtype.element_ty)
    )


def float32_values() -> Tensor:
    """4096 values of every exponent and both signs: ties, subnormals, infinities; no NaN."""
    generator = torch.Generator().manual_seed(1)
    special = torch.tensor(
        [0.0, -0.0, 65504.0, -65504.0, 65519.9, 65520.0, 1e5, 3.4028235e38, torch.inf, -torch.inf]
    )
    halves = torch.tensor([0x1000, 0x3000, 0x8000, 0x18000], dtype=torch.int32)
    ties = (torch.arange(255, dtype=torch.int32).unsqueeze(1) * 0x800000 + halves).flatten()
    count = 4096 - special.numel() - ties.numel()
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = torch.where(is_nan, bits & -0x40000001, bits)
    return torch.cat([special, ties.view(torch.float32), bits.view(torch.float32)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [_stochastic_round_kernel, _round_to_nearest_kernel])
def test_rounding(
    kernel: triton.runtime.JITFunction, dtype: torch.dtype, device: torch.device
) -> None:
    values = float32_values()
    generator = torch.Generator().manual_seed(2)
    random = torch.randint(-(2**63), 2**63 - 1, values.shape, generator=generator)
    out = torch.zeros(values.shape, dtype=dtype, device=device)
    kernel[(4,)](values.to(device), random.to(device), out, BLOCK=1024)
    if kernel is _stochastic_round_kernel:
        assert_same_bits(out, reference.stochastic_round(values, dtype, random))
    else:
        assert_same_bits(out, values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_keeps_nan(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
    values = values.view(torch.float32).to(device)
    out = torch.zeros(4, dtype=dtype, device=device)
    random = torch.full((4,), -1, device=device)
    for kernel in (_stochastic_round_kernel, _round_to_nearest_kernel):
        kernel[(1,)](values, random, out, BLOCK=4)
        assert out.isnan().all()


@triton.jit
def _as_float32_kernel(values_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + index, as_float32(tl.load(values_ptr + index)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_as_float32_of_every_number(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = torch.where(values.isnan(), 0.0, values)
    out = torch.zeros(2**16, device=device)
    _as_float32_kernel[(16,)](values.to(device), out, BLOCK=4096)
    assert_same_bits(out, values.float())
