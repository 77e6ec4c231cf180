"""Dynamic tables of a sharded TorchRec model: statistics, and rows in and out by id."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.integrations.torchrec.sharded.collection_base import CollectionBase
from torchembed.integrations.torchrec.trained_model.unwrapped_model import unwrap
from torchembed.ops.hash_table import int64_keys
from torchembed.sharding.planning.partition import HashPartition
from torchembed.sharding.planning.plan import Placement
from torchembed.tables import (
    CountedTables,
    Delta,
    DeltaMark,
    HashIndex,
    RowChunk,
    StatisticsReader,
    Table,
    TableStatistics,
    check_at_least,
    check_score,
    read_delta,
    row_chunks,
    write_rows,
)
from torchembed.tables.dynamic.caller_scores import StepScores


class DynamicTable:
    """The part of one dynamic table of a sharded model that this rank holds. Use it between steps.

    Args:
        name: of the table.
        parts: a table for each range of columns that the rank holds; none where others hold it.
        ranks: the ranks, of those of ``group``, over which a hash divides the ids; None where each
            rank that holds the table holds all ids.
        group: all ranks of the collection.
        device: of the tables.
    """

    def __init__(
        self,
        name: str,
        parts: list[Table],
        ranks: tuple[int, ...] | None,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.name, self.parts = name, parts
        self._partition = None if ranks is None else HashPartition(ranks=ranks)
        self._group, self._device = group, device
        self._rank = dist.get_rank(group)
        self._reader = StatisticsReader()

    def statistics(self, *, wait: bool = False) -> TableStatistics | None:
        """Counts of the whole table. Collective; on a GPU a call gives what the copies begun by
        earlier calls of this object have brought, None at first.

        Args:
            wait: True for the figures of now, for which the call waits.
        """
        first = next((part for part in self.parts if not part.first_column), None)
        counted = CountedTables({self.name: first}, self._device, self._group)
        return self._reader.read(counted, wait=wait).get(self.name)

    def row_chunks(self, max_bytes: int, *, with_states: bool = True) -> Iterator[RowChunk]:
        """The rows that the rank holds, with their ids, in parts of at most ``max_bytes``; of
        several ranges of columns those of one after the other. See
        :func:`torchembed.tables.row_chunks`."""
        for part in self.parts:
            yield from row_chunks(part, max_bytes, with_states=with_states)

    def write_rows(self, chunk: RowChunk) -> int:
        """Give the ids of ``chunk`` that belong on this rank its rows; every rank is to be given
        the same chunks. See :func:`torchembed.tables.write_rows`.

        Args:
            chunk: of whole rows.

        Returns:
            How many of them found no place.
        """
        own, num_left = self._of_rank(chunk), 0
        for part in self.parts:
            columns = slice(part.first_column, part.first_column + part.num_columns)
            states = {
                name: state[:, columns] if state.dim() == 2 else state
                for name, state in own.states.items()
            }
            num_left = write_rows(part, own._replace(rows=own.rows[:, columns], states=states))
        return num_left

    def _of_rank(self, chunk: RowChunk) -> RowChunk:
        if self._partition is None or self._rank not in self._partition.ranks:
            return chunk
        place = self._partition.ranks.index(self._rank)
        here = (self._partition.places_of(chunk.keys) == place).nonzero().flatten()

        def take(tensor: Tensor) -> Tensor:
            return tensor[here.to(tensor.device)]

        return RowChunk(
            take(chunk.keys),
            take(chunk.rows),
            {name: take(state) for name, state in chunk.states.items()},
            scores=None if chunk.scores is None else take(chunk.scores),
            touched=None if chunk.touched is None else take(chunk.touched),
        )

    def delta(self, since: DeltaMark | None = None) -> Delta:
        """The changes of this rank's rows since a mark; see
        :meth:`torchembed.EmbeddingBagCollection.delta`."""
        return read_delta(self.parts, since)

    @torch.no_grad()
    def evict(self, *, max_rows: int) -> None:
        """Evict ids until at most ``max_rows`` are left on this rank; rows in use stay.

        Raises:
            TypeError: for a number that is no int.
            ValueError: for a negative number.
        """
        check_at_least("max_rows", max_rows, 0)
        for index, number in self._indices():
            index.evict(number, max_rows)

    @torch.no_grad()
    def erase(self, ids: Tensor) -> None:
        """Take ids and their rows out where the rank holds them; rows in use stay.

        Args:
            ids: of any shape; int64, int32, uint32 or uint64 (by its bits).
        """
        for index, number in self._indices():
            index.erase(number, int64_keys(ids).flatten().to(index.hash_tables.keys.device))

    @torch.no_grad()
    def set_score(self, score: int | None) -> None:
        """Let training batches give ``score`` to all ids that they use, of a table under
        :class:`torchembed.CallerScores`; every rank is to call it alike. See
        :meth:`torchembed.EmbeddingBagCollection.set_score`."""
        if score is not None:
            check_score("score", score)
        for index, number in self._indices():
            self._step_scores(index).set(number, score)

    @torch.no_grad()
    def assign_scores(self, ids: Tensor, scores: Tensor) -> None:
        """Give scores to ids that the rank holds, of a table under
        :class:`torchembed.CallerScores`; every rank is to call it alike.

        Args:
            ids: of any shape; int64, int32, uint32 or uint64 (by its bits).
            scores: int64, of the same shape.
        """
        checks.check_dtype("scores", scores, (torch.int64,), "call .long()")
        checks.check_shape("scores", scores, tuple(ids.shape), "one for each id")
        for index, number in self._indices():
            self._step_scores(index)
            device = index.hash_tables.keys.device
            keys = int64_keys(ids).flatten().to(device)
            index.assign_scores(number, keys, scores.flatten().to(device))

    def _step_scores(self, index: HashIndex) -> StepScores:
        if index.step_scores is None:
            raise ValueError(
                f"eviction of dynamic table {self.name} must be CallerScores() to take scores, got "
                "a policy that counts uses itself"
            )
        return index.step_scores

    def _indices(self) -> Iterator[tuple[HashIndex, int]]:
        for part in self.parts:
            index = part.group.index
            assert isinstance(index, HashIndex)
            yield index, part.group.tables.index(part)


def dynamic_tables(model: nn.Module) -> dict[str, DynamicTable]:
    """The dynamic tables of a model whose collections torchembed's sharders have sharded, by name:
    that of their config, behind the name of the collection in the user's model, as ``sparse.item``.

    Args:
        model: a ``DistributedModelParallel``, or a module in it, from which names begin then.
    """
    found: dict[str, DynamicTable] = {}
    for path, module in unwrap(model).inner.named_modules():
        if not isinstance(module, CollectionBase):
            continue
        parts = module.dynamic_tables
        for plan in module.table_plans:
            if plan.takes_any_id:
                ranks = None
                if plan.placement in (Placement.ROW_WISE, Placement.TABLE_ROW_WISE):
                    ranks = tuple(shard.rank for shard in plan.shards)
                name = f"{path}.{plan.table}".strip(".")
                held = parts.get(plan.table, [])
                found[name] = DynamicTable(
                    plan.table, held, ranks, module.process_group, module.device
                )
    return found
