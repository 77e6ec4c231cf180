"""Conversions between float32, in which kernels compute, and the 16-bit types of rows."""

import triton
import triton.language as tl

from torchembed.core import environment

# The interpreter's casts from and to bfloat16 truncate and lose subnormals; bits do neither.
_INTERPRETED = tl.constexpr(environment.triton_interpreted())


@triton.jit
def as_float32(value):
    """``value``, of any float dtype, as float32; exact."""
    if _INTERPRETED and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def round_to_nearest(value, DTYPE: tl.constexpr):
    """Float32 ``value`` as DTYPE, to nearest, ties to even."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        # Half of the last kept bit is added, less one where that bit is 0: ties go to even.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = 0x7FC0
        rounded = tl.where(value == value, rounded, quiet_nan)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def stochastic_round(value, random, DTYPE: tl.constexpr):
    """Float32 ``value`` as the 16-bit DTYPE, up or down with probability by nearness.

    ``random`` holds a uint64 for each element, whose upper 16 bits are random: these are added
    below what bfloat16 keeps, their upper 13 below what float16 keeps, and the sum is cut off.
    Values that DTYPE holds stay; infinities, NaN and float16's overflow round to nearest.

    Example: 1 + 2**-9 lies a quarter of the way from 1 to 1 + 2**-7, its neighbours in bfloat16.
    With upper bits 0xC000 (three quarters of 2**16) it becomes 1 + 2**-7, with 0xBFFF it becomes 1.
    """
    # An exponent of all ones is an infinity or NaN, to which noise must not be added.
    bits = value.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    if DTYPE == tl.bfloat16:
        noise = (random >> 48).to(tl.int32)
        rounded = ((bits + noise) & -0x10000).to(tl.float32, bitcast=True)
        return round_to_nearest(tl.where(finite, rounded, value), DTYPE)
    # float16 keeps 10 bits of the fraction's 23: noise goes to the 13 below.
    noise = (random >> 51).to(tl.int32)
    normal = ((bits + noise) & -0x2000).to(tl.float32, bitcast=True)
    # Below 2**-14 float16 is spaced evenly, by 2**-24; both products are exact.
    steps = tl.floor(tl.abs(value) * 16777216.0 + noise.to(tl.float32) * 0.0001220703125)
    magnitude = (steps * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
    subnormal = (magnitude | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    rounded = tl.where(tl.abs(value) < 6.103515625e-05, subnormal, normal)
    fits = finite & (tl.abs(rounded) <= 65504.0)
    return tl.where(fits, rounded, value).to(DTYPE)
