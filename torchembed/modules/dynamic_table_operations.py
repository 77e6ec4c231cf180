"""The operations of modules on the dynamic tables that they hold."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.tables import (
    CountedTables,
    Delta,
    DeltaMark,
    GrowingTables,
    HashIndex,
    StatisticsReader,
    TableGrowth,
    TableSet,
    TableStatistics,
    check_at_least,
    check_score,
    delta_on_all_ranks,
    read_delta,
    read_mark,
)


class DynamicTableOperations(nn.Module):
    """A module whose dynamic tables grow, are counted, and give ids and rows away on demand."""

    _table_set: TableSet

    def __init__(self) -> None:
        super().__init__()
        self._statistics, self._growth = StatisticsReader(), TableGrowth()

    @property
    def admission_changes_tables(self) -> bool:
        """True if training may insert or evict rows, so that each trained batch must be admitted
        once, and no other."""
        groups = self._table_set.current_groups()
        return any(group.changes_on_admission for group in groups)

    def timed_indices(self) -> list[HashIndex]:
        """The indices whose rows live for some seconds: they must note the time between steps."""
        indices = [group.index for group in self._table_set.current_groups()]
        return [i for i in indices if isinstance(i, HashIndex) and i.expires_by_time]

    @property
    def growth(self) -> TableGrowth:
        """Says when the module's dynamic tables grow."""
        return self._growth

    def growing_tables(self) -> GrowingTables | None:
        """The dynamic tables that may grow; None where there are none, or none any more."""
        if self._growth.is_over:
            return None
        self._table_set.current_groups()
        parts = [[table] for table in self._table_set.tables if table.spec.index.grows]
        if not parts:
            self._growth.is_over = True
            return None
        return GrowingTables(parts, parts[0][0].parameter.device, None)

    def _grow_in_forward(self) -> None:
        """Let dynamic tables grow before a forward admits ids, if they are to: between steps."""
        if self._growth.is_over or self._growth.is_held:
            return
        tables = self.growing_tables()
        if tables is None or (tables.max_over is None and tables.are_in_use):
            return
        due = self._growth.due(tables)
        if due:
            self.grow(due)

    def grow(self, due: Mapping[int, int]) -> None:
        """Let dynamic tables grow that are ``due``, as :meth:`TableGrowth.due` says, between steps;
        collective where ranks share them. Waits for the device."""
        tables = self.growing_tables()
        if tables is not None and self._growth.grow(tables, due):
            self._growth.due(tables, 0)

    def statistics(self, *, wait: bool = False) -> dict[str, TableStatistics]:
        """Counts of the dynamic tables, by name: ids looked up, inserted, evicted and so on.

        Call it between steps. On a GPU it does not wait: each call gives what the copies begun by
        earlier ones have brought, of some steps ago, and the first calls give nothing. On a CPU
        the figures are of now. The table of a module of one table has the name ``weight``. Where
        tables are spread over ranks every rank calls it, equally often, and gets the figures of
        the whole tables.

        Args:
            wait: True for the figures of now on a GPU too, for which the call waits.
        """
        return self._statistics.read(self.counted_tables(), wait=wait)

    def counted_tables(self) -> CountedTables:
        """The dynamic tables, as :meth:`statistics` reads their counters."""
        groups = [g for g in self._table_set.current_groups() if isinstance(g.index, HashIndex)]
        tables = {table.spec.name: table for group in groups for table in group.tables}
        device = groups[0].weight.device if groups else torch.device("cpu")
        return CountedTables(tables, device)

    @torch.no_grad()
    def evict(self, *, max_rows: int, table: str | None = None) -> None:
        """Evict ids of a dynamic table until at most ``max_rows`` are left: those of the least
        score by its ``eviction``, of equal ones the longest unused, of these the first rows.

        Rows that a step or gradients still need stay, even if more are left. Memory stays as it is.
        Call it between steps. It never waits for a GPU.

        Args:
            max_rows: at least 0.
            table: its name; None for the only table of the module.

        Raises:
            TypeError: for a number that is no int.
            ValueError: for a negative number, or a name of no dynamic table.
        """
        parts = self._dynamic_parts(table)
        check_at_least("max_rows", max_rows, 0)
        for index, number in parts:
            index.evict(number, max_rows)

    @torch.no_grad()
    def erase(self, ids: Tensor, *, table: str | None = None) -> None:
        """Take ids and their rows out of a dynamic table; those that it does not hold are nothing.

        Rows that a step or gradients still need stay. Call it between steps. It never waits for a
        GPU.

        Args:
            ids: of any shape; int64, int32, uint32 or uint64 (by its bits).
            table: its name; None for the only table of the module.

        Raises:
            TypeError: for another dtype.
            ValueError: for a name of no dynamic table.
        """
        parts = self._dynamic_parts(table)
        keys = checks.signed_ids("ids", ids).long().flatten()
        for index, number in parts:
            index.erase(number, keys.to(index.hash_tables.keys.device))

    @torch.no_grad()
    def set_score(self, score: int | None, *, table: str | None = None) -> None:
        """Let training batches give ``score`` to all ids that they use of a dynamic table whose
        ``eviction`` is :class:`~torchembed.CallerScores`, until the next call.

        Call it between steps. It counts for batches that are admitted from then on; a
        ``TrainPipeline`` admits each during the step before. It never waits for a GPU.

        Args:
            score: an int64; None: ids keep their scores, and new ones get ``initial_score``.
            table: its name; None for the only dynamic table of the module.

        Raises:
            TypeError, ValueError: for a score that is no int64, or a name of no such table.
        """
        parts = self._scored_parts(table)
        if score is not None:
            check_score("score", score)
        for index, number in parts:
            assert index.step_scores is not None
            index.step_scores.set(number, score)

    @torch.no_grad()
    def assign_scores(self, ids: Tensor, scores: Tensor, *, table: str | None = None) -> None:
        """Give scores to ids of a dynamic table whose ``eviction`` is
        :class:`~torchembed.CallerScores`; those that it does not hold are nothing.

        An id keeps its score until it gets another one, here or by :meth:`set_score`. Of several
        scores of an id the greatest holds. Call it between steps. It never waits for a GPU.

        Args:
            ids: of any shape; int64, int32, uint32 or uint64 (by its bits).
            scores: int64, of the same shape.
            table: its name; None for the only dynamic table of the module.

        Raises:
            TypeError: for another dtype.
            ValueError: for another shape, or a name of no such table.
        """
        parts = self._scored_parts(table)
        keys = checks.signed_ids("ids", ids).long().flatten()
        checks.check_dtype("scores", scores, (torch.int64,), "call .long()")
        checks.check_shape("scores", scores, tuple(ids.shape), "one for each id")
        for index, number in parts:
            device = index.hash_tables.keys.device
            index.assign_scores(number, keys.to(device), scores.flatten().to(device))

    def _scored_parts(self, table: str | None) -> list[tuple[HashIndex, int]]:
        """:meth:`_dynamic_parts` of a table with scores of the caller."""
        parts = self._dynamic_parts(table)
        if any(index.step_scores is None for index, _ in parts):
            raise ValueError(
                f"eviction of dynamic table {table or self._dynamic_names()[0]} must be "
                "CallerScores() to take scores, got a policy that counts uses itself"
            )
        return parts

    def _dynamic_names(self) -> list[str]:
        """The names of the module's dynamic tables, whichever rank holds them."""
        return [t.spec.name for t in self._table_set.tables if t.spec.num_ids is None]

    @property
    def has_dynamic_tables(self) -> bool:
        """True if some table of the module is dynamic, whichever rank holds it."""
        return bool(self._dynamic_names())

    def _check_dynamic(self) -> None:
        if not self.has_dynamic_tables:
            raise ValueError(
                "this module has no dynamic table, which the call is for; give one "
                "dynamic=Dynamic(...)"
            )

    def _dynamic_parts(self, table: str | None) -> list[tuple[HashIndex, int]]:
        """The index, and the table's number in it, of each part that is held here of the dynamic
        table named ``table``, None for the only one; empty where other ranks hold the table."""
        self._check_dynamic()
        names = self._dynamic_names()
        if table is None and len(names) == 1:
            (table,) = names
        if table not in names:
            raise ValueError(
                f"table must be the name of a dynamic table of this module, {sorted(names)}, "
                f"got {table!r}"
            )
        return [
            (group.index, number)
            for group in self._table_set.current_groups()
            for number, of_group in enumerate(group.tables)
            if isinstance(group.index, HashIndex) and of_group.spec.name == table
        ]

    def note_loaded(self) -> None:
        """Bring what follows from the ids of dynamic tables in line with these, after tensors of
        the state dict were written to in place."""
        for table in self._table_set.tables:
            contents = table.index_contents()
            if contents:
                table.load_index_contents(contents)
        self.note_moved_ids()

    def note_moved_ids(self) -> None:
        """Note that ids of dynamic tables may have other rows by now, on every rank, whichever
        holds them: batches that pipelines have prepared are prepared again."""
        if self.has_dynamic_tables:
            self._table_set.note_change()

    def delta(self, since: DeltaMark | None = None) -> Delta:
        """The ids of the dynamic tables that were inserted, used or taken away since a mark, with
        their rows, and the mark of now.

        Call it between steps, on the stream of the training loop; it waits for a GPU. Rows that
        training did not write, such as those of static tables, are not in it. Where tables are
        spread over ranks, every rank calls it and gets the changes of its rows, of which
        :func:`~torchembed.gather_delta` makes those of whole tables; where it fails on one rank it
        fails on all.

        Args:
            since: ``mark`` of an earlier delta of this module on this rank; None for a full
                snapshot.

        Raises:
            SnapshotDueError: where more ids left tables since the mark than their ``deletion_log``
                holds, or ids were loaded, so that a full snapshot is due.
            TypeError: for a ``since`` that is no mark.
            ValueError: for a mark of other tables, a table without a ``deletion_log``, or a module
                without dynamic tables.
        """
        self._check_dynamic()
        if since is not None and not isinstance(since, DeltaMark):
            raise TypeError(
                f"since must be the mark of an earlier delta, or None for all rows, got {since!r}"
            )
        group = self.counted_tables().group
        tables = self._table_set.tables
        if group is None:
            return read_delta(tables, since)
        return delta_on_all_ranks(lambda: read_delta(tables, since), group)

    def delta_mark(self) -> DeltaMark:
        """The mark of now, as of a :meth:`delta`, where rows were read otherwise, as by
        ``row_chunks``. Called as ``delta`` is, and raises the same."""
        self._check_dynamic()
        group = self.counted_tables().group
        tables = self._table_set.tables
        if group is None:
            return read_mark(tables)
        return delta_on_all_ranks(lambda: read_mark(tables), group)
