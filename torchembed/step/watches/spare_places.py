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

import torch
from torch import Tensor

from torchembed.core.trees import Tree
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import LookedUpBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.watches.forward_numbers import OTHER_NUMBERS, Summary, first_difference
from torchembed.step.watches.trial_steps import Trial, in_words, trial_step

_ADVICE = (
    "go by the offsets of what the collection returns, whose values have spare places behind "
    "offsets[-1]"
)
_FILLS = "fill_uninitialized_memory"
_WAYS = ("with spare places", "without them")


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
        Exception: what the model raises for ``batch`` as it was read; on all ranks where on one.
    """
    try:
        with _poisoned_memory():
            plain = _trial(program, optimizers, lambda: LookedUpBatch(batch))
            try:
                padded = _trial(program, optimizers, look_up)
            except Exception as error:  # noqa: BLE001 - said, the same on all ranks
                found = in_words(error)
            else:
                found = _difference(plain, padded)
    finally:
        optimizers.zero_grad()
    return None if found is None else f"{found}; {_ADVICE}"


def _trial(
    program: StepProgram, optimizers: StepOptimizers, look_up: Callable[[], LookedUpBatch]
) -> Trial:
    """A trial whose summary ends with the gradients of dense parameters."""
    gradients = Summary()

    def note(name: str, grad: Tensor) -> None:
        gradients.add(f"the gradient of {name}", grad)

    trial = trial_step(program, optimizers, look_up, note)
    trial.summary.extend(gradients)
    return trial


def _difference(plain: Trial, padded: Trial) -> str | None:
    if plain.draws != padded.draws:
        return "forward draws random numbers for spare places too, and so others than without them"
    numbers, others = plain.summary.numbers, padded.summary.numbers
    if [number.name for number in numbers] != [number.name for number in others]:
        return OTHER_NUMBERS
    by_plain, by_padded = plain.summary.values().tolist(), padded.summary.values().tolist()
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
