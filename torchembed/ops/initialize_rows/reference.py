"""The specification of ``initialize_rows`` in eager torch."""

import math

import torch
from torch import Tensor

from torchembed.core.random_bits import random_bits, random_uniform, shift_right
from torchembed.core.types import InitializerKind
from torchembed.core.update_records import RowInitialization

_SQRT_HALF_BITS = 0x3F3504F3
_QUARTER = 1 << 22
"""A quarter of a turn, of which 2**24 steps are one."""


def _log_of_steps(steps: Tensor) -> Tensor:
    """The natural logarithm of ``steps / 2**24``, float32, for int64 ``steps`` in ``[1, 2**24]``.

    ``steps`` is ``x * 2**e`` with ``x`` in ``[sqrt(1/2), sqrt(2))``, and the logarithm of ``x`` is
    the series of the inverse hyperbolic tangent. Only operations that IEEE 754 rounds in one way
    are used, so all devices and kernels agree on each bit.
    """
    bits = steps.to(torch.float32).view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    x = (bits - (exponent << 23)).view(torch.float32)
    s = (x - 1.0) / (x + 1.0)
    z = s * s
    series = ((z * (2 / 9) + 2 / 7) * z + 2 / 5) * z + 2 / 3
    return (exponent - 24).to(torch.float32) * math.log(2) + (s * 2.0 + s * z * series)


def _cosine_of_turn(steps: Tensor) -> Tensor:
    """The cosine of ``steps / 2**24`` turns, float32, for int64 ``steps`` in ``[0, 2**24)``.

    The nearest quarter of a turn is taken off in integers, and what is left, at most an eighth,
    goes into the series of sine or cosine.
    """
    quarter = (steps + _QUARTER // 2) // _QUARTER
    t = (steps - quarter * _QUARTER).to(torch.float32) * (2 * math.pi / (1 << 24))
    z = t * t
    sine = ((z * (1 / 362880) - 1 / 5040) * z + 1 / 120) * z - 1 / 6
    sine = t * z * sine + t
    cosine = (((z * (-1 / 3628800) + 1 / 40320) * z - 1 / 720) * z + 1 / 24) * z - 0.5
    cosine = z * cosine + 1.0
    magnitude = torch.where(quarter % 2 == 0, cosine, sine)
    return torch.where((quarter == 1) | (quarter == 2), -magnitude, magnitude)


def standard_normal(keys: Tensor, columns: Tensor) -> Tensor:
    """Float32 standard normal numbers, for each broadcast pair of int64 ``keys`` and ``columns``
    (Box, Muller 1958); the same bits on every device."""
    first = shift_right(random_bits(keys, 2 * columns), 40)
    second = shift_right(random_bits(keys, 2 * columns + 1), 40)
    # In float64, since the root that torch takes of float32 numbers on a CPU may be a bit off.
    radius = (_log_of_steps((1 << 24) - first) * -2.0).double().sqrt().float()
    return radius * _cosine_of_turn(second)


def initialize_rows_reference(new: RowInitialization) -> None:
    if new.weight.numel() == 0:
        return
    is_new = new.rows >= 0
    if new.num_new is not None:
        is_new &= torch.arange(new.rows.numel(), device=new.rows.device) < new.num_new
    rows, ids, tables = new.rows[is_new], new.ids[is_new], new.tables[is_new].long()

    columns = torch.arange(new.weight.shape[1], device=new.weight.device).unsqueeze(0)
    if new.first_columns is not None:
        columns = columns + new.first_columns[tables].unsqueeze(1)
    keys = random_bits(new.table_keys[tables], ids).unsqueeze(1)
    kind = new.kinds[tables].unsqueeze(1)
    first, second = new.parameters[tables].unsqueeze(2).unbind(1)
    uniform = first + second * random_uniform(keys, columns)
    normal = first + second * standard_normal(keys, columns)
    values = torch.where(kind == InitializerKind.UNIFORM, uniform, first)
    values = torch.where(kind == InitializerKind.NORMAL, normal, values)

    new.weight[rows] = values.to(new.weight.dtype)
    for state in (new.state0, new.state1):
        if state is not None:
            state[rows] = new.initial_state
