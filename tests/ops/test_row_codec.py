"""Rows in e4m3 with a scale each, against float64."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous
from torchembed.core.checks import FLOAT_DTYPES
from torchembed.ops.row_codec import decode_rows, encode_rows, scaled_rows

E4M3 = sorted(
    {n * 2.0**-9 for n in range(8)}
    | {(8 + n) * 2.0**e for n in range(8) for e in range(-9, 6)} - {480.0}
)
"""All magnitudes of the format but NaN's place."""


def nearest(values: Tensor) -> Tensor:
    """Float64 ``values`` as the nearest e4m3 numbers; of two as near, the one of the even code."""
    numbers = torch.tensor(E4M3, dtype=torch.float64)
    upper = torch.searchsorted(numbers, values.abs()).clamp(1, len(E4M3) - 1)
    below, above = numbers[upper - 1], numbers[upper]
    down, up = values.abs() - below, above - values.abs()
    takes_upper = (up < down) | ((up == down) & (upper % 2 == 0))
    return torch.where(takes_upper, above, below).copysign(values)


def expected(rows: Tensor) -> tuple[Tensor, list[int]]:
    """What finite ``rows`` become, in float64, and the bytes of their scales."""
    decoded, scales = [], []
    for row in rows.double():
        # Rounding leads to the next power of two from 31/32 of it on.
        exponent = math.frexp(float(row.abs().max()) * 32 / 31)[1] - 1
        scales.append(max(exponent - 7 + 127, 1) if row.any() else 1)
        scale = 2.0 ** (scales[-1] - 127)
        decoded.append(nearest(row / scale) * scale)
    return torch.stack(decoded), scales


def many_magnitudes(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows whose elements are of sizes that differ by up to 2**30, and so are the rows'."""
    within, between = (normal(*s, seed=3).mul(8) for s in ((num_rows, dim), (num_rows, 1)))
    values = normal(num_rows, dim, seed=4) * torch.exp2(within + between.round())
    limit = torch.finfo(torch.float16).max / 2
    return values.clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("dim", [1, 5, 16, 128, 300])
def test_is_float64s_nearest_element(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = many_magnitudes(37, dim, dtype)
    codes = encode_rows(rows.to(device))
    decoded, scales = expected(rows)
    assert codes.shape == (37, dim + 1) and codes.dtype == torch.uint8
    assert codes[:, -1].tolist() == scales
    found = decode_rows(codes, torch.float32)
    assert torch.equal(found.double().cpu(), decoded)
    assert_same_bits(decode_rows(codes, dtype), decoded.to(device, dtype))
    assert_same_bits(encode_rows(found), codes)
    errors = (rows.double() - decoded).abs()
    largest = rows.double().abs().amax(dim=1, keepdim=True)
    assert (errors <= torch.maximum(rows.double().abs() * 2**-4, largest * 2**-16)).all()


def test_every_code_and_every_tie(device: torch.device) -> None:
    numbers = torch.tensor([n for n in E4M3 if n < 256], dtype=torch.float64)
    ties = (numbers[1:] + numbers[:-1]) / 2
    rows = torch.cat([numbers, ties, torch.tensor([247.99])]).float().unsqueeze(0)
    rows = torch.cat([rows, -rows])
    found = decode_rows(encode_rows(rows.to(device)), torch.float32).cpu()
    assert torch.equal(found.double(), nearest(rows.double()))
    assert torch.equal(found[0, : len(numbers)].double(), numbers)


def test_zeros_and_the_ends_of_float32(device: torch.device) -> None:
    finfo = torch.finfo(torch.float32)
    rows = torch.tensor(
        [
            [0.0, -0.0, 0.0],
            [finfo.smallest_normal, -finfo.smallest_normal / 2, 0.0],
            [2.0**-140, -(2.0**-149), 0.0],
            [1.75 * 2.0**127, -1.0, 2.0**112],
        ],
        device=device,
    )
    codes = encode_rows(rows)
    assert codes[:, -1].tolist() == [1, 1, 1, 247]
    found = decode_rows(codes, torch.float32)
    assert_same_bits(found[0], rows[0])
    assert found[1].tolist() == rows[1].tolist()
    # The least number whose scale's inverse is a normal number: 2**-9 * 2**-126.
    assert found[2].tolist() == [0.0, 0.0, 0.0]
    assert found[3].tolist() == [1.75 * 2.0**127, 0.0, 2.0**112]
    beyond = encode_rows(torch.full((1, 1), finfo.max, device=device))
    assert decode_rows(beyond, torch.float32).tolist() == [[math.inf]]
    large = encode_rows(torch.full((1, 2), 65504.0, dtype=torch.float16, device=device))
    assert decode_rows(large, torch.float16).tolist() == [[math.inf, math.inf]]
    assert decode_rows(large, torch.bfloat16).tolist() == [[65536.0, 65536.0]]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_infinities_and_nan_become_nan_alone(dtype: torch.dtype, device: torch.device) -> None:
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[1.0, inf, -3.0, nan], [nan, -inf, inf, nan]], dtype=dtype, device=device)
    found = decode_rows(encode_rows(rows), dtype)
    assert found.isnan().tolist() == [[False, True, False, True], [True] * 4]
    assert found[0, ::2].tolist() == [1.0, -3.0]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("dim", [5, 128])
def test_elements_and_scales_apart(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = many_magnitudes(37, dim, dtype).to(device)
    rows[3, 2], rows[4] = torch.inf, 0
    elements, scales = scaled_rows(rows)
    codes = encode_rows(rows)
    assert elements.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert elements.view(torch.uint8).tolist() == codes[:, :-1].tolist()
    assert scales.tolist() == [[2.0 ** (byte - 127)] for byte in codes[:, -1].tolist()]
    of_none = scaled_rows(rows[:0])
    assert of_none.elements.shape == (0, dim) and of_none.scales.shape == (0, 1)


def test_rows_that_are_few_or_not_contiguous(device: torch.device) -> None:
    rows = normal(6, 8, seed=1, device=device)
    codes = encode_rows(rows)
    assert_same_bits(encode_rows(not_contiguous(rows)), codes)
    decoded = decode_rows(codes, torch.float32)
    assert_same_bits(decode_rows(not_contiguous(codes), torch.float32), decoded)
    assert encode_rows(rows[:0]).shape == (0, 9)
    assert decode_rows(codes[:0], torch.bfloat16).shape == (0, 8)
    assert_same_bits(encode_rows(rows[-1:]), codes[-1:])


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"^rows must be float32 or float16 or bfloat16, got float"):
        encode_rows(torch.zeros(1, 1, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match=r"^rows must have 2 dimension\(s\), got shape \(3,\)"):
        encode_rows(torch.zeros(3, device=device))
    with pytest.raises(ValueError, match=r"^rows must have at least one column, got .*\(3, 0\)$"):
        encode_rows(torch.zeros(3, 0, device=device))
    codes = torch.zeros(2, 3, dtype=torch.uint8, device=device)
    with pytest.raises(TypeError, match=r"^codes must be uint8, got int8; take them from encode"):
        decode_rows(codes.char(), torch.float32)
    with pytest.raises(ValueError, match=r"^codes must have a column of scales after .*\(2, 1\)$"):
        decode_rows(codes[:, :1], torch.float32)
    with pytest.raises(TypeError, match=r"^dtype must be float32, float16 or bfloat16, got int64$"):
        decode_rows(codes, torch.int64)


def test_opcheck(device: torch.device) -> None:
    rows = normal(5, 8, seed=1, device=device)
    torch.library.opcheck(torch.ops.torchembed.encode_rows.default, (rows,))
    torch.library.opcheck(torch.ops.torchembed.scaled_rows.default, (rows,))
    codes = encode_rows(rows)
    torch.library.opcheck(torch.ops.torchembed.decode_rows.default, (codes, torch.bfloat16))


def test_compiles_once(device: torch.device) -> None:
    compiled = compiled_once(lambda rows: decode_rows(encode_rows(rows), torch.float32) + 1)
    for count in (2, 5, 9):
        rows = normal(count, 8, seed=count, device=device)
        assert torch.equal(compiled(rows), decode_rows(encode_rows(rows), torch.float32) + 1)


@pytest.mark.gpu
def test_captured(device: torch.device) -> None:
    rows = normal(300, 128, seed=1, device=device)
    decode_rows(encode_rows(rows), torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode_rows(encode_rows(rows), torch.float32)
    rows.mul_(-3)
    graph.replay()
    assert_same_bits(found, decode_rows(encode_rows(rows), torch.float32))
