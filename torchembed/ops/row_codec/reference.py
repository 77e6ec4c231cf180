"""The specification of the operations on rows in 8 bits in eager torch."""

import torch
from torch import Tensor


def encode_rows_reference(rows: Tensor) -> Tensor:
    elements, exponents = _scaled(rows)
    return torch.cat([elements.view(torch.uint8), exponents.to(torch.uint8)], dim=1)


def scaled_rows_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    elements, exponents = _scaled(rows)
    return elements, _power_of_two(exponents)


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 elements, and the biased exponents, int32 ``[N, 1]``, of the scales that they are
    multiplied by."""
    rows = rows.float()
    is_finite = torch.isfinite(rows)
    largest = rows.abs().where(is_finite, 0.0).amax(dim=1, keepdim=True)
    # The bits of the exponent give the power of two exactly, without a logarithm's rounding. Half
    # of the last bit that e4m3 keeps is added, which rounds the largest as it will be.
    exponents = (largest.view(torch.int32) + (1 << 19)) >> 23
    # The least scale whose inverse, 2**126, is a normal number.
    scales = (exponents - 7).clamp_min(1)
    # Infinities are NaN before the cast, which some releases of torch let saturate.
    scaled = rows.where(is_finite, torch.nan) * _power_of_two(254 - scales)
    return scaled.to(torch.float8_e4m3fn), scales


def decode_rows_reference(codes: Tensor, dtype: torch.dtype) -> Tensor:
    elements, scales = codes[:, :-1], codes[:, -1:].int()
    return (elements.view(torch.float8_e4m3fn).float() * _power_of_two(scales)).to(dtype)


def _power_of_two(biased: Tensor) -> Tensor:
    """``2**(biased - 127)``, float32, of int32 exponents from 1 to 254."""
    return (biased << 23).view(torch.float32)
