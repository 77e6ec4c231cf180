"""What a step leaves to whoever reads the model after it, which a replay leaves elsewhere."""

from collections.abc import Sequence

from torch import Tensor

from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.watches.attribute_uses import LeftAttribute


class LeftByStep:
    """Gradients and attributes of modules that the captured steps of two buffers leave.

    Args:
        optimizers: of the steps.
    """

    def __init__(self, optimizers: StepOptimizers) -> None:
        self._optimizers = optimizers
        self._gradients: list[list[tuple[Tensor, Tensor | None]]] = [[], []]
        self._attributes: list[Sequence[LeftAttribute]] = [[], []]
        self._in_slots: list[tuple[Tensor, Tensor]] = []
        """Dense parameters with gradients that both buffers' captured steps write."""

    def note_capture(self, buffer: int, attributes: Sequence[LeftAttribute]) -> None:
        """Note what the buffer's step, captured just now, has left, and take the gradients."""
        self._attributes[buffer] = attributes
        self._in_slots = self._optimizers.gradients_in_slots()
        self._gradients[buffer] = self._optimizers.take_gradients_of_others()

    def put(self, buffer: int) -> None:
        """Put what the last replay of the buffer's step has computed where the step would have."""
        # A replay writes gradients to the memory of the capture. Optimizers that step outside the
        # graph look for them in .grad.
        for parameter, grad in self._gradients[buffer]:
            parameter.grad = grad
        for attribute in self._attributes[buffer]:
            attribute.put()
        # For whoever reads them after the step. The first one tells whether they were cleared.
        if self._in_slots and self._in_slots[0][0].grad is not self._in_slots[0][1]:
            for parameter, grad in self._in_slots:
                parameter.grad = grad
