"""Forms in which the rows of served tables are kept."""

import enum

import torch
from torch import Tensor

from torchembed.core import checks

_SCALE_BYTES = 4
_MAX_CODES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The greatest number of each dtype of eight bits, to which the greatest element of a row goes."""


class RowFormat(enum.Enum):
    """The form of a row in caches and stores: a line of bytes, the same in all of them.

    Rows of 8 bits have a float32 scale each, of which their elements are multiples: the greatest
    element, by its absolute value, divided by the greatest number of the dtype. Its line is the
    scale, the elements, and zeros up to a multiple of four bytes.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    """Numbers beyond its range become infinite."""
    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3, with a scale. An element is off by 1/16 of itself at most, or by 1/1024 of the
    scale."""
    INT8 = "int8"
    """Integers from -127 to 127, with a scale. An element is off by half the scale at most."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an element."""
        return _DTYPES[self]

    @property
    def has_scale(self) -> bool:
        """True where each row has a scale, so that its elements alone are not its numbers."""
        return self.dtype in _MAX_CODES

    def line_bytes(self, dim: int) -> int:
        """The bytes of a row of ``dim`` elements."""
        if not self.has_scale:
            return dim * self.dtype.itemsize
        return _SCALE_BYTES + -(-dim // _SCALE_BYTES) * _SCALE_BYTES

    def encode(self, rows: Tensor) -> Tensor:
        """The lines of ``rows``, rounded to the nearest, ties to even: uint8
        ``[n, line_bytes(D)]`` on the same device, contiguous.

        A row with a number that is not finite becomes NaN as a whole where it has a scale.

        Args:
            rows: float32, float16 or bfloat16 ``[n, D]``.

        Raises:
            TypeError, ValueError: for another dtype or shape.
        """
        checks.check_float("rows", rows)
        checks.check_dim("rows", rows, 2)
        num_rows, dim = rows.shape
        if not self.has_scale:
            # A width is given, since torch views no tensor without elements as another dtype's.
            elements = rows.to(self.dtype).contiguous()
            return elements.view(torch.uint8).view(num_rows, self.line_bytes(dim))
        numbers, greatest_code = rows.float(), _MAX_CODES[self.dtype]
        greatest = numbers.abs().amax(1, keepdim=True)
        # At least the least normal number: by it even zeros can be divided.
        scales = (greatest / greatest_code).clamp_min(torch.finfo(torch.float32).tiny)
        codes = numbers / scales
        if self is RowFormat.INT8:
            codes = codes.round()
        codes = codes.clamp(-greatest_code, greatest_code).nan_to_num(0.0).to(self.dtype)
        lines = rows.new_zeros(num_rows, self.line_bytes(dim), dtype=torch.uint8)
        lines[:, :_SCALE_BYTES] = scales.view(torch.uint8)
        lines[:, _SCALE_BYTES : _SCALE_BYTES + dim] = codes.view(torch.uint8)
        return lines

    def decode(self, lines: Tensor, dim: int) -> Tensor:
        """The rows of ``lines``: float32 ``[n, dim]`` on the same device.

        Args:
            lines: uint8 ``[n, line_bytes(dim)]``.

        Raises:
            TypeError, ValueError: for another dtype or shape.
        """
        checks.check_dtype("lines", lines, (torch.uint8,), "call .view(torch.uint8)")
        checks.check_dim("lines", lines, 2)
        meaning = "number of rows, line_bytes"
        checks.check_shape("lines", lines, (lines.shape[0], self.line_bytes(dim)), meaning)
        if not self.has_scale:
            return lines.contiguous().view(self.dtype).float()
        scales = lines[:, :_SCALE_BYTES].contiguous().view(torch.float32)
        codes = lines[:, _SCALE_BYTES : _SCALE_BYTES + dim].contiguous().view(self.dtype)
        return codes.float() * scales


_DTYPES = {
    RowFormat.FP32: torch.float32,
    RowFormat.FP16: torch.float16,
    RowFormat.BF16: torch.bfloat16,
    RowFormat.FP8: torch.float8_e4m3fn,
    RowFormat.INT8: torch.int8,
}
