"""Partitions: which of the ranks that share a table holds the row of an id."""

import dataclasses
import itertools
from collections.abc import Sequence

from torch import Tensor

from torchembed.ops.id_shares import shares_of_ids
from torchembed.sharding.planning.plan import Shard


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

    def make_local(self, ids: Tensor, rank: int) -> None:
        """Replace ``ids [L]`` of rows on ``rank`` by what the rank's row index is asked for, in
        place. Ids of other ranks are outside the rank's rows then."""
        first = self.first_ids[self.ranks.index(rank)]
        if first:
            ids.sub_(first)

    def boundaries(self, num_ranks: int) -> list[int]:
        """``[num_ranks + 1]``: rank w holds ids ``[out[w], out[w + 1])``, which its index numbers
        from 0."""
        ends = dict(zip(self.ranks, self.first_ids[1:], strict=True))
        of_ranks = [ends.get(rank, 0) for rank in range(num_ranks)]
        return list(itertools.accumulate(of_ranks, max, initial=0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashPartition:
    """Ids are any 64-bit integers, and a hash of an id chooses its rank, so that ids in a row, or
    all of one remainder, spread evenly. Each rank's index is asked for the id as it is.

    Attributes:
        ranks: those that hold ids, in increasing order.
    """

    ranks: tuple[int, ...]

    def places_of(self, ids: Tensor) -> Tensor:
        """The place in :attr:`ranks` of the rank that holds the row of each of ``ids [L]``, int64
        ``[L]``: a function of the id and of the number of ranks alone.

        On the device of ``ids``; never waits for a GPU.
        """
        return shares_of_ids(ids, len(self.ranks))


Partition = RangePartition | HashPartition
"""Divides the ids of a table among the ranks that hold its rows. A pure function of ids; equal
partitions divide them equally."""
