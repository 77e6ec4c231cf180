"""The public functions ``encode_rows``, ``decode_rows`` and ``scaled_rows``."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.row_codec.schema import decode_rows_op, encode_rows_op, scaled_rows_op


def encode_rows(rows: Tensor) -> Tensor:
    """Round each row to e4m3, an 8-bit floating-point format, after scaling it by a power of two.

    The scale brings the row's largest finite magnitude, once rounded, to ``[2**7, 2**8)``; e4m3
    ends at 448. An element loses at most 2**-4 of itself or 2**-16 of the largest, whichever is
    more.
    Ties go to even. Infinities and NaN become NaN and leave the scale of the others as it is.
    Encoding what :func:`decode_rows` gives changes nothing. Has no gradient; never synchronizes.

    Formats: e4m3 is ``torch.float8_e4m3fn`` (https://arxiv.org/abs/2209.05433); scales are E8M0
    (Open Compute Project, Microscaling Formats 1.0), with one for a row in place of 32 elements.

    Args:
        rows: float32, float16 or bfloat16, ``[N, D]``, ``D >= 1``.

    Returns:
        uint8 ``[N, D + 1]``: the elements, then the byte ``b`` of the scale ``2**(b - 127)`` that
        they are multiplied by when they are decoded.

    Raises:
        TypeError, ValueError: for a dtype or shape that does not fit.
    """
    return encode_rows_op(rows.contiguous())


def decode_rows(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the rows that :func:`encode_rows` has encoded, in ``dtype``.

    The same on every device. Rounding may have led up to 2**-4 beyond the largest number of
    ``dtype``, which then becomes infinite. Has no gradient; never synchronizes.

    Args:
        codes: uint8 ``[N, D + 1]``.
        dtype: float32, float16 or bfloat16.

    Returns:
        ``[N, D]``.

    Raises:
        TypeError, ValueError: for a dtype or shape that does not fit.
    """
    return decode_rows_op(codes.contiguous(), dtype)


class ScaledRows(NamedTuple):
    """Result of :func:`scaled_rows`."""

    elements: Tensor
    """``[N, D]``, float8_e4m3fn."""
    scales: Tensor
    """``[N, 1]``, float32: powers of two, which the elements are to be multiplied by."""


def scaled_rows(rows: Tensor) -> ScaledRows:
    """Round each row as :func:`encode_rows` does, and give elements and scales apart, as products
    in 8 bits take them.

    Args:
        rows: float32, float16 or bfloat16, ``[N, D]``, ``D >= 1``.

    Raises:
        TypeError, ValueError: for a dtype or shape that does not fit.
    """
    return ScaledRows(*scaled_rows_op(rows.contiguous()))
