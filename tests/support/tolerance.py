"""Tolerances that follow from the arithmetic: nothing here is a chosen number."""

from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""Probability with which drawing other random numbers fails a check of right ones."""
DEVIATIONS = NormalDist().inv_cdf(1 - FALSE_ALARM / 2)
"""By how many standard deviations, nearly five, normal numbers are off with that probability."""
NUDGE_UNITS = 1024
"""By how many float32 eps in relation to itself a parameter is nudged: so many that roundings do
not hide what a nudge does, and so few that the effect of one is a part of theirs."""
Formula = Callable[[torch.dtype], Tensor]
"""An oracle: the result, computed by a plain formula in the given dtype."""


def assert_follows(actual: Tensor, formula: Formula) -> None:
    """Assert that ``actual`` is as near to the exact result, ``formula(float64)``, as eager low
    precision would be: ``formula(float32)``, rounded to its dtype."""
    exact = formula(torch.float64).detach()
    assert exact.dtype == torch.float64, "the formula must be computed in the dtype it is given"
    assert_as_near(actual, formula(torch.float32).detach().to(actual.dtype), exact)


def assert_as_near(actual: Tensor, eager: Tensor, exact: Tensor, *, slack: float = 0.0) -> None:
    """Assert that the largest error of ``actual`` is at most twice that of ``eager``, plus one eps
    of its dtype at the size of the largest exact element, plus ``slack``."""
    shapes = [tuple(tensor.shape) for tensor in (actual, eager, exact)]
    assert len(set(shapes)) == 1, f"result, eager and exact must have one shape, got {shapes}"
    assert actual.is_floating_point(), f"the result must be floating-point, got {actual.dtype}"
    assert eager.dtype == actual.dtype, f"eager is {eager.dtype}, and the result {actual.dtype}"
    assert exact.dtype == torch.float64, f"exact must be float64, got {exact.dtype}"
    if exact.numel() == 0:
        return
    result, eager, exact = (t.detach().cpu().double() for t in (actual, eager, exact))
    for name, numbers in (("result", result), ("eager result", eager), ("exact result", exact)):
        assert torch.isfinite(numbers).all(), f"the {name} has NaN or infinite elements"
    band = torch.finfo(actual.dtype).eps * exact.abs().max()
    allowed = 2 * (eager - exact).abs().max() + band + slack
    errors = (result - exact).abs()
    assert errors.max() <= allowed, (
        f"largest error {errors.max():.3e} at flat position {int(errors.argmax())} of shape "
        f"{tuple(exact.shape)}, allowed {allowed:.3e}; {int((errors > allowed).sum())} elements off"
    )


def relative_error(num_roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """The largest relative error after ``num_roundings`` roundings in ``dtype``, one of which takes
    the result of another, in products, quotients and sums of numbers of one sign."""
    unit = torch.finfo(dtype).eps / 2
    return num_roundings * unit / (1 - num_roundings * unit)


def assert_same_sums(
    actual: Tensor, expected: Tensor, sizes: Tensor | float, num_roundings: int
) -> None:
    """Assert that each element of ``actual`` may be the same sum as that of ``expected``, added up
    in another order.

    Either is off by :func:`relative_error` of its size at most: the sum of its terms' absolute
    values, which ``sizes`` holds. ``num_roundings`` are those that one term goes through: its own,
    and at most one for each other term.
    """
    assert actual.dtype == expected.dtype
    assert tuple(actual.shape) == tuple(expected.shape)
    allowed = 2 * relative_error(num_roundings, actual.dtype) * torch.as_tensor(sizes).cpu()
    errors = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs()
    # Where one is NaN it is not within what is allowed.
    is_off = ~(errors <= allowed)
    assert not is_off.any(), (
        f"{int(is_off.sum())} of {actual.numel()} sums differ, the first by {errors[is_off][0]:.3e}"
    )


def assert_within_drift(
    found: Sequence[float],
    expected: Sequence[float],
    nudged: Sequence[float],
    *,
    num_steps: int,
    size: float | None = None,
) -> None:
    """Assert that numbers of two float32 trainings are equal up to the roundings of their steps.

    ``nudged`` are those of ``expected``'s training whose parameters began ``NUDGE_UNITS`` units of
    rounding off, of which one is what both trainings together may round a parameter by in a step:
    half a unit each. Then the numbers are rounded, too. All of it is in relation to ``size``,
    without which each number counts in relation to its own.
    """
    first, second, moved = (
        torch.tensor(each, dtype=torch.float64) for each in (found, expected, nudged)
    )
    sizes = second.abs() if size is None else torch.full_like(second, size)
    drift = ((moved - second).abs() / sizes).max() / NUDGE_UNITS
    assert drift > 0, "a nudge must change the numbers"
    allowed = (num_steps * drift + torch.finfo(torch.float32).eps) * sizes
    errors = (first - second).abs()
    assert (errors <= allowed).all(), (
        f"largest error {(errors / sizes).max():.3e}, allowed {num_steps} times {drift:.3e}"
    )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert equal dtype, shape and bits; NaNs and the signs of zeros included."""
    assert actual.dtype == expected.dtype
    assert tuple(actual.shape) == tuple(expected.shape)
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    if actual.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
        actual, expected = actual.view(bits), expected.view(bits)
    different = int((actual != expected).sum())
    assert different == 0, f"{different} of {actual.numel()} elements differ in their bits"
