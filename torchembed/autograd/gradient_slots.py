"""Where the gradient of a parameter belongs: its part of a flat buffer, that is used as a whole."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GradientSlot:
    """The part of a flat buffer that belongs to the gradient of one parameter.

    What computes gradients may write the first one of a step there; ``weight.grad`` is then that
    part of the buffer, and nothing is copied. A gradient that lies elsewhere is as good, and costs
    whoever needs the whole buffer a copy.

    Args:
        parameter: a leaf, of the dtype of ``flat``.
        flat: the buffer.
        start: where the gradient begins in it.
        stop: where the next one begins; zeros fill what is between.
    """

    def __init__(self, parameter: Tensor, flat: Tensor, start: int, stop: int) -> None:
        former = slot_of(parameter)
        if former is not None:
            former._hook.remove()
        self.memory = flat[start : start + parameter.numel()].view(parameter.shape)
        self._flat, self._start, self._stop = flat, start, stop
        self._is_claimed = False
        # Until the engine has accumulated what was written, a second use of the parameter in the
        # same backward must not write there. A frozen parameter may be freed later, but torch takes
        # no hook of it meanwhile.
        is_frozen = not parameter.requires_grad
        parameter.requires_grad_(True)
        self._hook = parameter.register_post_accumulate_grad_hook(self._release)
        parameter.requires_grad_(not is_frozen)
        parameter.torchembed_gradient_slot = self  # type: ignore[attr-defined]

    def _release(self, _: Tensor) -> None:
        self._is_claimed = False

    def claim(self, parameter: Tensor) -> Tensor | None:
        """Memory for the gradient of ``parameter``; None where it holds another already, or the
        parameter was moved or cast since."""
        if parameter.grad is not None or self._is_claimed:
            return None
        if parameter.dtype is not self.memory.dtype or parameter.device != self.memory.device:
            return None
        self._is_claimed = True
        # A tensor of its own: the engine makes no copy of a gradient that nobody else holds.
        return self.memory.detach()

    def holds(self, grad: Tensor | None) -> bool:
        """Whether ``grad`` lies here."""
        return grad is not None and grad.data_ptr() == self.memory.data_ptr()

    def __reduce__(self) -> Any:
        # A parameter that is pickled leaves its optimizer behind.
        return _no_slot, ()


def _no_slot() -> None:
    return None


def slot_of(parameter: Tensor) -> GradientSlot | None:
    """The slot of the gradient of ``parameter``, where something has made one."""
    return getattr(parameter, "torchembed_gradient_slot", None)


class FlatSpans(NamedTuple):
    """Parts of a flat buffer."""

    flat: Tensor
    spans: list[tuple[int, int]]
    """Where each begins and ends."""

    def parts(self) -> list[Tensor]:
        """Each part's memory."""
        return [self.flat[start:stop] for start, stop in self.spans]


def joint_spans(parameters: Sequence[Tensor]) -> FlatSpans | None:
    """The parts of a flat buffer that are the slots of ``parameters``, in order, and nothing else:
    one for all that come one after the other. None where some have none, or in other buffers."""
    slots = [slot_of(parameter) for parameter in parameters]
    first = slots[0]
    if first is None:
        return None
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if slot is None or slot._flat is not first._flat:
            return None
        if spans and spans[-1][1] == slot._start:
            spans[-1] = spans[-1][0], slot._stop
        else:
            spans.append((slot._start, slot._stop))
    return FlatSpans(first._flat, spans)


def gather_gradients(parameters: Sequence[Tensor]) -> None:
    """Bring gradients of ``parameters`` that lie elsewhere into their slots."""
    slots, elsewhere = [], []
    for parameter in parameters:
        slot = slot_of(parameter)
        assert slot is not None
        if parameter.grad is not None and not slot.holds(parameter.grad):
            slots.append(slot.memory)
            elsewhere.append(parameter.grad)
            parameter.grad = slot.memory.detach()
    if slots:
        torch._foreach_copy_(slots, elsewhere)  # type: ignore[attr-defined]
    for gradient in elsewhere:
        # Backward, that goes on elsewhere, would use their memory again before they are copied.
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())
