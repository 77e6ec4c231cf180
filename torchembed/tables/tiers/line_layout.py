"""The layout of a line: a row of the weight and the rows of its optimizer states, as bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor


class LineLayout:
    """The layout of a line: the bytes of the weight's row, and then those of each state's.

    Args:
        tensors: a weight ``[n, D]`` and its states, ``[n, ...]`` each, of any number of rows and on
            any device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        sizes = [tensor.element_size() * tensor.shape[1:].numel() for tensor in tensors]
        self._ends = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0).tolist()

    def equals(self, other: "LineLayout") -> bool:
        """True if lines of both hold the same."""
        return (self._shapes, self._dtypes) == (other._shapes, other._dtypes)

    @property
    def line_bytes(self) -> int:
        """Bytes of a line."""
        return self._ends[-1]

    def empty(self, num_rows: int, num_tensors: int | None = None) -> list[Tensor]:
        """Memory for ``num_rows`` rows of the weight and each state, or of the first so many of
        them, on the CPU."""
        pairs = list(zip(self._shapes, self._dtypes, strict=True))[:num_tensors]
        return [torch.empty(num_rows, *shape, dtype=dtype, device="cpu") for shape, dtype in pairs]

    def packed(self, tensors: Sequence[Tensor], places: Tensor | None = None) -> Tensor:
        """Lines uint8 ``[n, line_bytes]`` of the rows at ``places``, int64 ``[n]``, of ``tensors``;
        None for all rows."""
        parts = [_bytes_of(tensor) for tensor in tensors]
        found = [part if places is None else part.index_select(0, places) for part in parts]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim=1)

    def unpack(self, lines: Tensor, tensors: Sequence[Tensor], places: Tensor) -> None:
        """Write ``lines`` to the rows at ``places``, int64 ``[n]``, of ``tensors``, of which there
        may be the first few alone."""
        first = 0
        for tensor, end in zip(tensors, self._ends, strict=False):
            _bytes_of(tensor).index_copy_(0, places, lines[:, first:end])
            first = end


def _bytes_of(tensor: Tensor) -> Tensor:
    """The rows of ``tensor [n, ...]`` as bytes ``[n, bytes]``, a view."""
    return tensor.reshape(len(tensor), tensor.shape[1:].numel()).view(torch.uint8)
