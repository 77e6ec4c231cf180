"""Partitions: which of the ranks that share a table holds the row of an id."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchembed.sharding.planning.plan import Shard


class Partition(Protocol):
    """Divides the ids of a table among the ranks that hold its rows. Pure: a function of ids."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold rows, in increasing order."""
        ...

    def rank_of(self, ids: Tensor) -> Tensor:
        """For each of ``ids [L]`` the rank that holds its row, int64; -1 where none does.

        On the device of ``ids``; never waits for a GPU.
        """
        ...

    def make_local(self, ids: Tensor, rank: int) -> None:
        """Replace ``ids [L]`` of rows on ``rank`` by what the rank's row index is asked for, in
        place."""
        ...

    def boundaries(self, num_ranks: int) -> list[int] | None:
        """``[num_ranks + 1]``: rank w holds ids ``[out[w], out[w + 1])``, which its index numbers
        from 0; None where the ids of some rank are no range. An id in no range then says by itself
        that the rank has no row for it; of other partitions validity is told apart."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RangePartition:
    """Each rank holds a range of ids, and numbers its rows from 0.

    Attributes:
        ranks: those that hold ids, in increasing order.
        first_ids: of each of them, in increasing order, and at last the end of the last range.
    """

    ranks: tuple[int, ...]
    first_ids: tuple[int, ...]

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> "RangePartition":
        """The rows of ``shards``, which follow one another in the order of ranks."""
        ends = [shard.first_row + shard.num_rows for shard in shards]
        firsts = (*(shard.first_row for shard in shards), *ends[-1:])
        return cls(ranks=tuple(shard.rank for shard in shards), first_ids=firsts)

    def rank_of(self, ids: Tensor) -> Tensor:
        ranks = torch.full_like(ids, -1, dtype=torch.int64)
        for rank, (first, end) in zip(self.ranks, itertools.pairwise(self.first_ids), strict=True):
            ranks.masked_fill_((ids >= first) & (ids < end), rank)
        return ranks

    def make_local(self, ids: Tensor, rank: int) -> None:
        first = self.first_ids[self.ranks.index(rank)]
        if first:
            ids.sub_(first)

    def boundaries(self, num_ranks: int) -> list[int]:
        ends = dict(zip(self.ranks, self.first_ids[1:], strict=True))
        of_ranks = [ends.get(rank, 0) for rank in range(num_ranks)]
        return list(itertools.accumulate(of_ranks, max, initial=0))
