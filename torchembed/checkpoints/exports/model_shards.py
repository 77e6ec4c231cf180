"""The tensors of a model by their global shapes, and the shards of them that each rank holds."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torchembed.core import ranks
from torchembed.tables import meta_rows_in_state_dicts, read_rows, row_ranges, table_of


class Shard(NamedTuple):
    """A block of a tensor, on one rank."""

    rank: int
    offsets: tuple[int, ...]
    """First index of the block in each dimension of the whole tensor."""
    sizes: tuple[int, ...]


class WholeTensor(NamedTuple):
    """A tensor that is spread over ranks; each element is in exactly one of the shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_table: bool
    """True for the weight of an embedding table."""
    shards: tuple[Shard, ...]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one element along the first dimension."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class ModelShards:
    """Every parameter and persistent buffer of ``model``, by its name in ``state_dict``.

    Making one is collective. The tensors are the model's own, not copies: later training shows.

    Attributes:
        tensors: what all ranks hold, by name; the same on every rank.
    """

    def __init__(self, model: nn.Module) -> None:
        ranks.check_cpu_backend()
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with meta_rows_in_state_dicts():
            named = model.state_dict()
        state = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self._planner.set_up_planner(
            state_dict=state, storage_meta=None, is_coordinator=ranks.rank() == 0
        )
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        found = ((name, table_of(parameter)) for name, parameter in model.named_parameters())
        self._tables = {name: table for name, table in found if table is not None}
        described = []
        for item in self._planner.create_local_plan().items:
            data, name = item.tensor_data, item.index.fqn
            assert data is not None
            shard = Shard(ranks.rank(), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            self._items[name, shard.offsets] = item
            shape, is_table = tuple(data.size), name in self._tables
            described.append((name, shape, data.properties.dtype, is_table, shard))
        self.tensors = _whole_tensors(ranks.gather_objects(described))

    def _held(self, name: str, shard: Shard, first_row: int, last_row: int) -> Tensor:
        """Rows ``[first_row, last_row)`` of the whole tensor, of a shard on this rank; a view."""
        table = self._tables.get(name)
        if table is not None:
            return read_rows(table, range(first_row, last_row), with_states=False).rows
        held = self._planner.resolve_data(self._items[name, shard.offsets])
        assert isinstance(held, Tensor)
        if not shard.sizes:
            return held.reshape(1)
        return held[first_row - shard.offsets[0] : last_row - shard.offsets[0]]

    def rows_on_first_rank(self, name: str, first_row: int, last_row: int) -> Tensor | None:
        """Rows ``[first_row, last_row)`` of a tensor, on rank 0's CPU; None on the others.

        Every rank must call it; those that hold some of the rows send them.
        """
        whole, mine = self.tensors[name], ranks.rank()
        rows = None
        if mine == 0:
            rows = torch.empty((last_row - first_row, *whole.shape[1:]), dtype=whole.dtype)
        for shard in whole.shards:
            # A tensor without dimensions is one row.
            start, size = (shard.offsets[0], shard.sizes[0]) if whole.shape else (0, 1)
            first, last = max(first_row, start), min(last_row, start + size)
            if first >= last or mine not in (0, shard.rank):
                continue
            if mine == shard.rank:
                part = self._held(name, shard, first, last).cpu().contiguous()
            else:
                part = torch.empty((last - first, *shard.sizes[1:]), dtype=whole.dtype)
            # As bytes, since gloo does not send every dtype, float8 for one.
            if shard.rank != 0:
                raw = part.reshape(-1).view(torch.uint8)
                dist.send(raw, dst=0) if mine else dist.recv(raw, src=shard.rank)
            if rows is not None:
                block = [slice(first - first_row, last - first_row)]
                block += [
                    slice(offset, offset + size)
                    for offset, size in zip(shard.offsets[1:], shard.sizes[1:], strict=True)
                ]
                rows[tuple(block)] = part
        return rows

    def chunks(self, name: str, max_bytes: int) -> Iterator[tuple[int, Tensor | None]]:
        """All rows of a tensor in chunks of at most ``max_bytes``, or one row: the number of the
        first row and, on rank 0, the rows on the CPU. Every rank must take all of them."""
        whole = self.tensors[name]
        for part in row_ranges(whole.num_rows, whole.row_bytes, max_bytes):
            yield part.start, self.rows_on_first_rank(name, part.start, part.stop)


Description = tuple[str, tuple[int, ...], torch.dtype, bool, Shard]
"""Name, global shape, dtype, whether it is a table, and a shard."""


def _whole_tensors(described: list[list[Description]]) -> dict[str, WholeTensor]:
    """The tensors of which every rank has described its shards, in the order of the first rank that
    holds some of each. Of shards that several ranks hold, the first rank's counts."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype, dict[tuple[int, ...], Shard]]] = {}
    for of_rank in described:
        for name, shape, dtype, _, shard in of_rank:
            *_, shards = found.setdefault(name, (shape, dtype, {}))
            # The first rank that describes a shard is the one that sends it; replicas are passed
            # over.
            if 0 not in shard.sizes:
                shards.setdefault(shard.offsets, shard)
    # A rank may know part of a table, and hold none of it.
    tables = {name for of_rank in described for name, _, _, is_table, _ in of_rank if is_table}
    tensors = {}
    for name, (shape, dtype, shards) in found.items():
        held = sum(torch.Size(shard.sizes).numel() for shard in shards.values())
        assert held == torch.Size(shape).numel(), (name, shape, shards)
        tensors[name] = WholeTensor(shape, dtype, name in tables, tuple(shards.values()))
    return tensors
