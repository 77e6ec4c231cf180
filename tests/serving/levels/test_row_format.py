"""Forms of rows: what they hold, and by how much they are off."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchembed.serving.levels import RowFormat

EPS = {RowFormat.FP32: 0.0, RowFormat.FP16: 2.0**-11, RowFormat.BF16: 2.0**-8}
"""Half the distance of neighbouring numbers, in relation to them."""
STEPS = {RowFormat.FP16: 2.0**-25, RowFormat.BF16: 2.0**-134}
"""Half the distance of those next to zero."""
FLOAT32_ROUNDINGS = 2 * 2.0**-24
"""Of a division by the scale, and of the product with it."""


def bounds(row_format: RowFormat, rows: Tensor) -> Tensor:
    """The largest error that each element may have, in float64."""
    size = rows.double().abs()
    greatest = size.amax(1, keepdim=True)
    if row_format is RowFormat.INT8:
        scale = (greatest / 127).clamp_min(2.0**-126)
        return scale * (0.5 + 127 * FLOAT32_ROUNDINGS)
    if row_format is RowFormat.FP8:
        scale = (greatest / 448).clamp_min(2.0**-126)
        rounded = torch.maximum(size * 2.0**-4, scale * 2.0**-10)
        return rounded * (1 + 2.0**-20) + size * FLOAT32_ROUNDINGS
    return torch.maximum(size * EPS[row_format], torch.tensor(STEPS.get(row_format, 0.0)).double())


@pytest.mark.parametrize("row_format", RowFormat)
@given(data=st.data(), dim=st.integers(1, 9), num_rows=st.integers(0, 4))
def test_elements_are_off_by_no_more_than_the_format_says(
    row_format: RowFormat, data: st.DataObject, dim: int, num_rows: int
) -> None:
    numbers = st.floats(-6e4, 6e4, width=32)
    drawn = data.draw(st.lists(numbers, min_size=num_rows * dim, max_size=num_rows * dim))
    rows = torch.tensor(drawn, dtype=torch.float32).view(num_rows, dim)
    lines = row_format.encode(rows)
    assert lines.dtype == torch.uint8
    assert lines.shape == (num_rows, row_format.line_bytes(dim))
    decoded = row_format.decode(lines, dim)
    assert decoded.dtype == torch.float32
    assert (decoded.double() - rows.double()).abs().le(bounds(row_format, rows)).all()
    # What was decoded is a row of the format, so that it is kept as it is, up to the scale's last
    # bit.
    again = row_format.decode(row_format.encode(decoded), dim)
    assert (again - decoded).abs().le(decoded.abs() * FLOAT32_ROUNDINGS).all()


def test_lines_are_as_long_as_they_say() -> None:
    lengths = {row_format: row_format.line_bytes(5) for row_format in RowFormat}
    assert lengths == {
        RowFormat.FP32: 20,
        RowFormat.FP16: 10,
        RowFormat.BF16: 10,
        RowFormat.FP8: 12,
        RowFormat.INT8: 12,
    }


def test_an_int8_line_is_scale_then_codes_then_zeros() -> None:
    line = RowFormat.INT8.encode(torch.tensor([[-127.0, 2.5, 3.5, 0.4, 1.0]]))
    assert line[:, :4].contiguous().view(torch.float32).item() == 1.0
    assert line[0, 4:].view(torch.int8).tolist() == [-127, 2, 4, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("row_format", [RowFormat.FP8, RowFormat.INT8])
def test_a_row_that_is_not_finite_becomes_nan(row_format: RowFormat) -> None:
    rows = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [3.0, -3.0]])
    decoded = row_format.decode(row_format.encode(rows), 2)
    assert decoded.isnan().tolist() == [[True, True], [True, True], [False, False]]
    assert decoded[2].tolist() == [3.0, -3.0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="rows must be float32 or float16 or bfloat16, got int64"):
        RowFormat.INT8.encode(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"lines must have shape \(3, 8\) .*got \(3, 7\)"):
        RowFormat.INT8.decode(torch.zeros(3, 7, dtype=torch.uint8), 2)
    with pytest.raises(TypeError, match="lines must be uint8, got float32"):
        RowFormat.FP32.decode(torch.zeros(3, 8), 2)
