"""Pieces of a tensor in another order."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchembed.core.stand_ins import KeptTensors

Reorder = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
"""``(tensor, sizes, order)`` to what :func:`in_order` gives."""

_NUM_KEPT = 8
_Form = tuple[torch.device, tuple[int, ...], tuple[int, ...]]


def in_order(tensor: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """The pieces ``order`` of ``tensor``, whose pieces have ``sizes`` along dim 0."""
    pieces = tensor.split(list(sizes))
    return torch.cat([tensor[:0], *(pieces[number] for number in order)])


class PieceOrder:
    """Does what :func:`in_order` does, for the same sizes and order again and again.

    On a GPU one gather moves all pieces, by an index that is made once and kept, since captured
    steps read it: with few long pieces ``torch.cat`` takes several times as long, and as much of
    the GPU. Only the first forms are kept; others are for ``torch.cat``, as is what needs
    gradients, which a gather would add up in any order.
    """

    def __init__(self) -> None:
        self._indices: KeptTensors[_Form, Tensor] = KeptTensors(_NUM_KEPT)

    def __call__(self, tensor: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        index = None
        if tensor.is_cuda and not tensor.requires_grad and not torch.compiler.is_compiling():
            index = self._index(tensor.device, tuple(sizes), tuple(order))
        if index is not None:
            return tensor.index_select(0, index)
        return in_order(tensor, sizes, order)

    def _index(
        self, device: torch.device, sizes: tuple[int, ...], order: tuple[int, ...]
    ) -> Tensor | None:
        form = device, sizes, order
        if form not in self._indices:
            is_capturing = torch.cuda.is_current_stream_capturing()
            if is_capturing or self._indices.is_full or sum(sizes) >= 2**31:
                return None
        return self._indices.get(form, lambda: _index(form))


@torch.inference_mode(mode=False)
def _index(form: _Form) -> Tensor:
    device, sizes, order = form
    places = torch.arange(sum(sizes), dtype=torch.int32)
    return in_order(places, sizes, order).to(device)
