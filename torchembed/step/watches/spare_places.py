"""Finds out whether a model computes the same where its vectors have spare places behind them.

Padded steps give a model that looks up a vector for each id more places than a batch has ids: zeros
that no bag holds. Whoever goes by offsets never sees them. A mean over all places does, and so do a
bias that is summed over them, an index that is made of a place's number, and random numbers of
which each place draws one. Before such steps train, the model is called on one batch in both ways,
without an update.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import LookedUpBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.watches.self_check import (
    OTHER_NUMBERS,
    Summary,
    first_difference,
    forward_summary,
)
from torchembed.step.watches.trial_calls import Draw, TrialCalls

_ADVICE = (
    "go by the offsets of what the collection returns, whose values have spare places behind "
    "offsets[-1]"
)
_FILLS = "fill_uninitialized_memory"
_WAYS = ("with spare places", "without them")


class _Computed(NamedTuple):
    """The numbers of one forward and backward."""

    summary: Summary
    draws: list[Draw]

    def by_name(self) -> list[list[float]]:
        """The norm and the sum of each number."""
        return self.summary.values().tolist()


def difference_of_spare_places(
    program: StepProgram,
    optimizers: StepOptimizers,
    batch: Tree,
    look_up: Callable[[], LookedUpBatch],
) -> str | None:
    """Say what the model computes otherwise where vectors have spare places; None for nothing.

    Changes nothing but the optimizers' gradients, which are taken away. Waits for a GPU.
    Collective; ranks may find different things.

    Args:
        program: what a step does.
        optimizers: the program's.
        batch: as it was read, on the device.
        look_up: gives the same batch with its vectors, which have spare places.

    Raises:
        Exception: what the model raises for ``batch`` as it was read.
    """
    restore = program.host_state.saved()
    try:
        with _poisoned_memory():
            plain, loss = _forward(program, LookedUpBatch(batch))
            _backward(program, optimizers, plain, loss)
            restore()
            error = padded = None
            try:
                padded, loss = _forward(program, look_up())
            except Exception as raised:  # noqa: BLE001 - said below, once all ranks know
                error = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
            # Backward is collective, so either all ranks come to it or none.
            if not ranks.any_rank(error is not None):
                assert padded is not None
                _backward(program, optimizers, padded, loss)
                error = _difference(plain, padded)
            else:
                error = error or "another rank's model cannot"
    finally:
        optimizers.zero_grad()
        restore()
    return None if error is None else f"{error}; {_ADVICE}"


def _forward(program: StepProgram, batch: LookedUpBatch) -> tuple[_Computed, Tensor]:
    with TrialCalls() as calls:
        summary, loss = forward_summary(program, batch)
    return _Computed(summary, calls.draws), loss


def _backward(
    program: StepProgram, optimizers: StepOptimizers, computed: _Computed, loss: Tensor
) -> None:
    """Add the gradients of dense parameters to what was ``computed``."""
    optimizers.zero_grad()
    loss.backward()
    for name, parameter in program.trained.named_parameters():
        if parameter.grad is not None:
            computed.summary.add(f"the gradient of {name}", parameter.grad)
    optimizers.zero_grad()


def _difference(plain: _Computed, padded: _Computed) -> str | None:
    if plain.draws != padded.draws:
        return "forward draws random numbers for spare places too, and so others than without them"
    numbers, others = plain.summary.numbers, padded.summary.numbers
    if [number.name for number in numbers] != [number.name for number in others]:
        return OTHER_NUMBERS
    by_plain, by_padded = plain.by_name(), padded.by_name()
    for place, (number, other) in enumerate(zip(numbers, others, strict=True)):
        if number.shape != other.shape:  # has spare places itself
            by_padded[place] = by_plain[place]
    return first_difference(numbers, by_padded, by_plain, _WAYS)


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Within it, new memory is NaN, so that an operation which leaves spare places of its results
    as they were shows in what is computed of them."""
    is_on = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    settings = sys.modules["torch.utils.deterministic"]  # attributes that its type does not show
    fills = getattr(settings, _FILLS)
    with warnings.catch_warnings():
        # Of operations that have no deterministic algorithm; both ways take the same one.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        setattr(settings, _FILLS, True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(is_on, warn_only=is_warning)
            setattr(settings, _FILLS, fills)
