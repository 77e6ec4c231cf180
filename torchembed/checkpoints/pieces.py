"""Which rank holds which part of each of a model's tensors, whatever the placement."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torchembed.core import ranks
from torchembed.tables import table_of


class Piece(NamedTuple):
    """A block of a tensor, on one rank."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class WholeTensor(NamedTuple):
    """A tensor that the ranks hold together; its pieces cover it once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_table: bool
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Of one element along the first dimension."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class Pieces:
    """Every parameter and persistent buffer of ``model``, by its name in ``state_dict``.

    Making one is collective, and the tensors are the model's own: what trains, changes.
    """

    def __init__(self, model: nn.Module) -> None:
        ranks.check_cpu_backend()
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state = {k: value for k, value in model.state_dict().items() if isinstance(value, Tensor)}
        self._planner.set_up_planner(
            state_dict=state, storage_meta=None, is_coordinator=ranks.rank() == 0
        )
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        tables = {k for k, parameter in model.named_parameters() if table_of(parameter) is not None}
        described = []
        for item in self._planner.create_local_plan().items:
            data, name = item.tensor_data, item.index.fqn
            assert data is not None
            piece = Piece(ranks.rank(), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            self._items[name, piece.offsets] = item
            shape = tuple(data.size)
            described.append((name, shape, data.properties.dtype, name in tables, piece))
        self.tensors = _put_together(ranks.gather_objects(described))

    def local(self) -> list[tuple[str, tuple[int, ...], Tensor]]:
        """This rank's pieces: name, offsets, and the memory in which the model holds it."""
        return [(name, offsets, self._held(name, offsets)) for name, offsets in self._items]

    def _held(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        held = self._planner.resolve_data(self._items[name, offsets])
        assert isinstance(held, Tensor)
        return held

    def rows_on_first_rank(self, name: str, first_row: int, last_row: int) -> Tensor | None:
        """Rows ``[first_row, last_row)`` of a tensor, on rank 0's CPU; None on the others.

        Every rank must call it; those that hold some of the rows send them.
        """
        whole, mine = self.tensors[name], ranks.rank()
        rows = None
        if mine == 0:
            rows = torch.empty((last_row - first_row, *whole.shape[1:]), dtype=whole.dtype)
        for piece in whole.pieces:
            # A tensor without dimensions is one row.
            start, size = (piece.offsets[0], piece.sizes[0]) if whole.shape else (0, 1)
            first, last = max(first_row, start), min(last_row, start + size)
            if first >= last or mine not in (0, piece.rank):
                continue
            if mine == piece.rank:
                own = self._held(name, piece.offsets).reshape(size, *piece.sizes[1:])
                part = own[first - start : last - start]
                part = part.cpu().contiguous()
            else:
                part = torch.empty((last - first, *piece.sizes[1:]), dtype=whole.dtype)
            if piece.rank != 0:
                raw = part.reshape(-1).view(torch.uint8)
                dist.send(raw, dst=0) if mine else dist.recv(raw, src=piece.rank)
            if rows is not None:
                block = [slice(first - first_row, last - first_row)]
                block += [
                    slice(offset, offset + size)
                    for offset, size in zip(piece.offsets[1:], piece.sizes[1:], strict=True)
                ]
                rows[tuple(block)] = part
        return rows

    def blocks(self, name: str, block_bytes: int) -> Iterator[tuple[int, Tensor | None]]:
        """All rows of a tensor, some ``block_bytes`` at once: the first row and, on rank 0, the
        rows. Every rank must take all of them."""
        whole = self.tensors[name]
        step = max(block_bytes // max(whole.row_bytes, 1), 1)
        for first_row in range(0, whole.num_rows, step):
            last_row = min(first_row + step, whole.num_rows)
            yield first_row, self.rows_on_first_rank(name, first_row, last_row)


Description = tuple[str, tuple[int, ...], torch.dtype, bool, Piece]


def _put_together(described: list[list[Description]]) -> dict[str, WholeTensor]:
    """In the order of the first rank that holds some of each. Of pieces that several ranks hold,
    the first rank's counts."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype, dict[tuple[int, ...], Piece]]] = {}
    for of_rank in described:
        for name, shape, dtype, _, piece in of_rank:
            *_, pieces = found.setdefault(name, (shape, dtype, {}))
            if 0 not in piece.sizes:
                pieces.setdefault(piece.offsets, piece)
    # A rank may know part of a table, and hold none of it.
    tables = {name for of_rank in described for name, _, _, is_table, _ in of_rank if is_table}
    tensors = {}
    for name, (shape, dtype, pieces) in found.items():
        held = sum(torch.Size(piece.sizes).numel() for piece in pieces.values())
        assert held == torch.Size(shape).numel(), (name, shape, pieces)
        tensors[name] = WholeTensor(shape, dtype, name in tables, tuple(pieces.values()))
    return tensors
