"""Forward and backward of a batch without an update, to compare what the model computes of it."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from torchembed.core import ranks
from torchembed.modules.lookup.forward_admission import without_admission
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import LookedUpBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.watches.forward_numbers import Summary, forward_summary
from torchembed.step.watches.trial_calls import Draw, TrialCalls


class OtherRankFailed(Exception):  # noqa: N818 - no error of this rank
    """The model raised an error on another rank alone."""


class Trial(NamedTuple):
    """The results of forward and backward of a batch."""

    summary: Summary
    """The outputs of all modules and, last, the loss."""
    loss: Tensor
    draws: list[Draw]
    """The random numbers of forward."""


def trial_step(
    program: StepProgram,
    optimizers: StepOptimizers,
    look_up: Callable[[], LookedUpBatch],
    note_gradient: Callable[[str, Tensor], None],
) -> Trial:
    """Call the model for a batch and its backward, and leave everything as it was.

    Collective; fails on all ranks where it fails on one.

    Args:
        program: what a step does.
        optimizers: the program's, whose gradients are taken away.
        look_up: gives the batch.
        note_gradient: called with the name and the gradient of each parameter that got one; the
            memory is used again.

    Raises:
        Exception: what the model raises.
        OtherRankFailed: where another rank's does.
    """
    optimizers.zero_grad()
    calls = TrialCalls()
    error: Exception | None = None
    found: tuple[Summary, Tensor] | None = None
    with program.host_state.unchanged(), without_admission():
        try:
            batch = look_up()
            with calls:
                found = forward_summary(program, batch)
        except Exception as raised:  # noqa: BLE001 - raised below, once all ranks know
            error = raised
        # Backward is collective, so either all ranks come to it or none.
        if ranks.any_rank(found is None):
            try:
                raise error or OtherRankFailed("another rank's model raises an error")
            finally:
                error = None  # whose traceback holds this frame, and with it what autograd has made
        assert found is not None
        summary, loss = found
        loss.backward()
    for name, parameter in program.named_parameters():
        if parameter.grad is not None:
            note_gradient(name, parameter.grad)
    optimizers.zero_grad()
    return Trial(summary, loss, calls.draws)


def in_words(error: Exception) -> str:
    """The first line of what a :func:`trial_step` raised."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, OtherRankFailed) else f"{type(error).__name__}: {first}"
