"""Slots of gradients: the parts of flat buffers in which parameters' gradients are written, so that
optimizers and all-reduces take a buffer as a whole."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.left_behind import LeftBehind


class GradientSlot(LeftBehind):
    """The part of a flat buffer that belongs to the gradient of one parameter.

    A backward function may write the first gradient of a step there; ``weight.grad`` is then that
    part of the buffer, and nothing is copied. A gradient in other memory is valid too, and is
    copied by whoever needs the whole buffer.

    Args:
        parameter: a leaf, of the dtype of ``flat``.
        flat: the buffer.
        start: element of the buffer at which the gradient begins.
        stop: element at which the next one begins; the elements between them are zeros.
    """

    def __init__(self, parameter: Tensor, flat: Tensor, start: int, stop: int) -> None:
        former = slot_of(parameter)
        if former is not None:
            former._hook.remove()
        self.memory = flat[start : start + parameter.numel()].view(parameter.shape)
        self._flat, self._start, self._stop = flat, start, stop
        self._is_claimed = False
        # From claim() until the engine has accumulated the gradient, a second use of the parameter
        # in the same backward must not write to the slot; the hook ends that time. Torch takes no
        # hook of a frozen parameter, which may be unfrozen later, so it is unfrozen for a moment.
        is_frozen = not parameter.requires_grad
        parameter.requires_grad_(True)
        self._hook = parameter.register_post_accumulate_grad_hook(self._release)
        parameter.requires_grad_(not is_frozen)
        parameter.torchembed_gradient_slot = self  # type: ignore[attr-defined]

    def _release(self, _: Tensor) -> None:
        self._is_claimed = False

    def claim(self, parameter: Tensor) -> Tensor | None:
        """Memory for the gradient of ``parameter``; None where the parameter has a gradient or is
        getting one already, or was moved or cast since the slot was made."""
        if parameter.grad is not None or self._is_claimed:
            return None
        if parameter.dtype is not self.memory.dtype or parameter.device != self.memory.device:
            return None
        self._is_claimed = True
        # A new tensor over the memory: the engine takes a gradient without a copy only where it
        # holds the last reference to it.
        return self.memory.detach()

    def holds(self, grad: Tensor | None) -> bool:
        """True where ``grad`` is in this slot."""
        return grad is not None and grad.data_ptr() == self.memory.data_ptr()


def slot_of(parameter: Tensor) -> GradientSlot | None:
    """The slot of the gradient of ``parameter``; None where no optimizer has made one."""
    slot = getattr(parameter, "torchembed_gradient_slot", None)
    return slot if isinstance(slot, GradientSlot) else None


class FlatSpans(NamedTuple):
    """Parts of a flat buffer, as ranges of its elements."""

    flat: Tensor
    spans: list[tuple[int, int]]
    """Begin and end of each part."""

    def parts(self) -> list[Tensor]:
        """The parts themselves, views of the buffer."""
        return [self.flat[start:stop] for start, stop in self.spans]


def joint_spans(parameters: Sequence[Tensor]) -> FlatSpans | None:
    """The parts of one flat buffer that the slots of ``parameters`` make up, in order; neighbours
    are one part. None where a parameter has no slot, or one in another buffer."""
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
    """Copy gradients of ``parameters`` that are in other memory to their slots."""
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
        # This stream copies while backward goes on on another one, where the allocator would hand
        # out the gradient's memory again.
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())
