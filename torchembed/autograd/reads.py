"""Which tensors of some are read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchembed.core.trees import tensors_in


class ReadsOf(TorchDispatchMode):
    """Finds out, within it, whose memory operations are given.

    Args:
        tensors: looked through at each operation, so that it may change meanwhile.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self.found: set[int] = set()
        """``id`` of each of them that one was given, or some of its memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Others than plain tensors stand for none, as while something is compiled.
        given = [t for t in tensors_in((args, kwargs)) if type(t) in (Tensor, nn.Parameter)]
        extents = list(map(_extent, given))
        for tensor in self._tensors:
            first, last = _extent(tensor)
            if any(start < last and first < stop for start, stop in extents):
                self.found.add(id(tensor))
        return func(*args, **(kwargs or {}))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which the elements of ``tensor`` are."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return first, first + (last + 1) * tensor.element_size()
