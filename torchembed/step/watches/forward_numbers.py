"""Numbers of a forward, as norms and sums, and the first difference between two ways to compute
it that rounding does not explain."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.trees import Tree, tensors_in
from torchembed.modules.lookup.bad_ids import deferred_id_checks
from torchembed.step.batches.counted_parts import for_model
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.lookup_calls import reusing
from torchembed.step.stages import LookedUpBatch
from torchembed.step.watches.called_modules import called_from_python

DEVIATIONS = 8.0
"""The standard deviations of rounding errors that may lie between two ways to compute a number."""
_PLAIN = frozenset((Tensor, nn.Parameter))
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
OTHER_NUMBERS = "forward calls other modules than it did, or with tensors of other shapes"


class Number(NamedTuple):
    """A tensor that is computed in two ways."""

    name: str
    shape: tuple[int, ...]
    epsilon: float
    """The distance from 1 to the next number of its dtype."""


class Summary:
    """The norm and the sum of each of several tensors, which stand for their elements.

    Both are computed in float64, so that they add no rounding of their own.
    """

    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self._values: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of floats that is no subclass's nor sparse; others are left out."""
        is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        if not is_plain or tensor.dtype not in _DTYPES:
            return
        tensor = tensor.detach()
        epsilon = torch.finfo(tensor.dtype).eps
        self.numbers.append(Number(name, tuple(tensor.shape), epsilon))
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        self._values.append(torch.stack([norm, tensor.sum(dtype=torch.float64)]))

    def extend(self, other: "Summary") -> None:
        """Add the numbers of another summary behind these."""
        self.numbers += other.numbers
        self._values += other._values

    def values(self) -> Tensor:
        """float64 ``[numbers, 2]``, in memory of its own."""
        return torch.stack(self._values)


def forward_summary(program: StepProgram, batch: LookedUpBatch) -> tuple[Summary, Tensor]:
    """Run forward. Returns the outputs of all modules and, last, the loss; and the loss."""
    summary = Summary()
    with (
        deferred_id_checks(),
        observed_outputs(program.model, summary),
        reusing(batch.calls, batch.lookups, batch.data),
    ):
        loss, _ = program.compute_loss(program.model, for_model(batch.data))
    summary.add("the loss", loss)
    return summary, loss


@contextlib.contextmanager
def observed_outputs(model: nn.Module, summary: Summary) -> Iterator[None]:
    """Within it, what modules of ``model`` return is added to ``summary``, call by call."""

    def note(name: str, module: nn.Module, arguments: Tree, output: Tree) -> None:
        del arguments
        for tensor in tensors_in(output):
            summary.add(f"the output of {name} ({type(module).__name__})", tensor)

    hooks = [
        module.register_forward_hook(functools.partial(note, name or "the model"))
        for name, module in called_from_python(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(
    numbers: Sequence[Number],
    by_one: Sequence[Sequence[float]],
    by_other: Sequence[Sequence[float]],
    ways: tuple[str, str],
) -> str | None:
    """The first number that differs by more than rounding explains, in words; None for none.

    The error of a norm, as a part of it, has a deviation of one rounding over the root of the
    number of elements, whose own roundings are independent. Errors of the numbers before it are
    independent too, but shared by all that is computed of one sample: they add one rounding each,
    over the root of the number of samples.

    Args:
        numbers: in the order in which they are computed.
        by_one, by_other: for each of them its norm and sum, computed in one of two ways.
        ways: in words.
    """
    num_samples = max((shape[0] for _, shape, _ in numbers if shape), default=1)
    largest = 0.0
    for position, (number, one, other) in enumerate(zip(numbers, by_one, by_other, strict=True)):
        num_elements = max(math.prod(number.shape), 1)
        largest = max(largest, number.epsilon)
        inherited = largest * math.sqrt((position + 1) / max(num_samples, 1))
        norm = other[0] * DEVIATIONS * (number.epsilon / math.sqrt(num_elements) + inherited)
        # A sum of n errors is at most the root of n times their norm.
        limits = norm, norm * math.sqrt(num_elements)
        for what, a, b, limit in zip(("norm", "sum"), one, other, limits, strict=True):
            is_same = a == b or (math.isnan(a) and math.isnan(b))
            if not is_same and not abs(a - b) <= limit:
                return f"{number.name} has the {what} {a:.9g} {ways[0]}, and {b:.9g} {ways[1]}"
    return None
