"""Finding out which of some tensors the operations in a block of code read."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchembed.core.trees import Tree, tensors_in


class ReadsOf(TorchDispatchMode):
    """Context that records whose memory the operations within it are given.

    Args:
        tensors: tensors to look for; read anew at each operation, so the sequence may grow.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self.found: set[int] = set()
        """``id`` of each tensor that an operation was given, as a whole or in part."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Tree],
        types: Sequence[type],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        # Subclasses, such as the fake tensors of a compilation, have no memory to compare.
        given = [t for t in tensors_in((args, kwargs)) if type(t) in (Tensor, nn.Parameter)]
        extents = [_extent(part) for tensor in given for part in _parts(tensor)]
        for tensor in self._tensors:
            first, last = _extent(tensor)
            if any(start < last and first < stop for start, stop in extents):
                self.found.add(id(tensor))
        return func(*args, **(kwargs or {}))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that ``tensor`` consists of: itself, or those of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of ``tensor`` and the one after its last element."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return first, first + (last + 1) * tensor.element_size()
