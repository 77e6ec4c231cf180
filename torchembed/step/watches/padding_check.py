"""Compares the model on padded batches with the model on the batches as they are.

Whoever says that a part of a batch may be padded says that the model ignores the padding. A model
that does not would train other numbers than a plain loop, without an error.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchembed.core import ranks
from torchembed.core.trees import Tree
from torchembed.step.batches.batch_layout import to_device
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.stages import LookedUpBatch, ReadBatch, Reason
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.watches.forward_numbers import DEVIATIONS
from torchembed.step.watches.trial_steps import in_words, trial_step


class PaddingCheck:
    """The comparisons of one pipeline, before steps that would train padded batches.

    A batch for which the model gives other numbers is trained as it is. Where the next one that is
    padded differs as well, padding is refused: one alone may be a rounding which turns over what
    the model selects.

    Args:
        program: what a step does.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program, self._optimizers = program, StepOptimizers(program.optimizers)
        self._num_steps = self._next = 0
        self._since: int | None = None
        """When steps had begun anew, as batches of other forms do, at the last comparison."""
        self._is_suspected = False
        self._refused: Reason | None = None
        self._num_as_given = 0
        """So many batches were read when padding was refused."""

    def why_as_given(self, now: ReadBatch) -> Reason | None:
        """The reason why ``now`` is to be trained as it was given; None where it may be padded.

        Collective while a comparison is due, which is in the same steps on all ranks.
        """
        self._num_steps += 1
        if now.number < self._num_as_given:
            return self._refused
        agreement, padding = now.agree(), self._program.padding
        every = self._program.self_check_every
        is_left_out = every is None and not padding.counted.are_known
        if not agreement.has_spare or is_left_out:
            return None
        is_due = every is not None and self._num_steps > self._next
        if not is_due and agreement.layouts_since == self._since:
            return None
        found = self._difference(now)
        if not ranks.any_rank(found is not None):
            self._next, self._since = self._num_steps + (every or 0), agreement.layouts_since
            self._is_suspected = False
            return None
        found = found or "on another rank, whose warning says more"
        if not self._is_suspected:
            self._is_suspected = True
            return Reason("the model computes other numbers for this batch where it is padded")
        self._is_suspected, self._num_as_given = False, padding.num_read
        self._refused = Reason(f"the model does not ignore padding: {found}")
        if padding.refuse():
            warnings.warn(
                "the model computes other numbers for batches that are padded as pad says, so "
                f"batches are trained as they are from now on: {found}. Let the model ignore the "
                "padding, or leave pad out",
                stacklevel=4,  # whoever called the pipeline
            )
        return self._refused

    def _difference(self, now: ReadBatch) -> str | None:
        device, model = self._program.device, self._program.model
        given = to_device(now.data, device)
        batches = given, given if now.padded is None else now.padded.filled(device)
        try:
            found = self._both(*batches)
            if model.training and any(isinstance(c, _Computed) and c.draws for c in found):
                # Random numbers would be others for other shapes.
                with _evaluated(model):
                    found = self._both(*batches)
        finally:
            self._optimizers.zero_grad()
        one, other = found
        if isinstance(one, _Computed) and isinstance(other, _Computed):
            return _difference(one, other)
        # What it raises for the batch as it is, the step raises.
        return other if isinstance(other, str) else None

    def _both(self, given: Tree, padded: Tree) -> list["_Computed | str"]:
        """The results for both; an error is raised on all ranks or none."""
        return [_computed(self._program, self._optimizers, batch) for batch in (given, padded)]


class _Computed(NamedTuple):
    """The results of forward and backward of one batch."""

    outputs: list[tuple[str, tuple[int, ...], float]]
    """The outputs of each module, in words, with shape and norm; in the order of calls."""
    epsilon: float
    """The largest distance from 1 to the next number of the outputs' dtypes."""
    loss: float
    gradients: dict[str, Tensor]
    """The gradients of dense parameters."""
    draws: bool
    """True where random numbers were drawn."""


def _computed(program: StepProgram, optimizers: StepOptimizers, batch: Tree) -> "_Computed | str":
    """Call the model for ``batch`` without an update; waits for the device.

    Returns:
        What it computes; an error in words where it raises one on some rank.
    """
    gradients: dict[str, Tensor] = {}

    def note(name: str, grad: Tensor) -> None:
        if type(grad) is Tensor and grad.layout is torch.strided:
            gradients[name] = grad.to(torch.float64, copy=True)

    try:
        trial = trial_step(program, optimizers, lambda: LookedUpBatch(batch), note)
    except Exception as error:  # noqa: BLE001 - said where it is of padding alone
        return in_words(error)
    summary = trial.summary
    norms = [norm for norm, _ in summary.values().tolist()]
    outputs = [(n.name, n.shape, norm) for n, norm in zip(summary.numbers, norms, strict=True)]
    epsilon = max(number.epsilon for number in summary.numbers)
    return _Computed(outputs, epsilon, trial.loss.item(), gradients, bool(trial.draws))


def _difference(given: _Computed, padded: _Computed) -> str | None:
    """The first difference that rounding does not explain, in words; None for none.

    Each of the outputs before the loss adds a rounding of its own, and so does backward on its way
    through them. Gradients are compared all together: one alone may be the sum of many numbers that
    cancel out, and then consists of rounding errors.
    """
    relative = DEVIATIONS * given.epsilon * math.sqrt(2 * len(given.outputs))
    differences, squares = [0.0], [0.0]
    for name in given.gradients.keys() | padded.gradients.keys():
        one, other = given.gradients.get(name), padded.gradients.get(name)
        if one is None or other is None:
            return f"only one of both gives a gradient of {name}"
        differences.append((one - other).square().sum().item())
        squares.append(one.square().sum().item())
    is_alike = _is_within(padded.loss, given.loss, relative * abs(given.loss))
    error, norm = math.sqrt(sum(differences)), math.sqrt(sum(squares))
    if is_alike and (not math.isfinite(norm) or error <= relative * norm):
        return None
    for (name, shape, expected), (what, padded_shape, norm_found) in zip(
        given.outputs, padded.outputs, strict=False
    ):
        if name != what:
            return f"forward gives {what}, where it gives {name} without padding"
        is_comparable = shape == padded_shape
        if is_comparable and not _is_within(norm_found, expected, relative * expected):
            return f"{name} has the norm {norm_found:.9g} padded, and {expected:.9g} as given"
    return f"the gradients differ by {error:.3g}, and their norm is {norm:.9g}"


def _is_within(found: float, expected: float, limit: float) -> bool:
    return (math.isnan(found) and math.isnan(expected)) or abs(found - expected) <= limit


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """A context in which all modules of ``model`` are in evaluation mode but those that normalize
    by the statistics of their batch, which padding may be part of."""
    trained = [m for m in model.modules() if m.training and not isinstance(m, _NormBase)]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True
