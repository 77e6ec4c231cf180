"""The base of the modules that hold embedding tables."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.core.types import OnBadId
from torchembed.modules.index_in_state_dict import IndexInStateDict
from torchembed.ops.hash_table import int64_keys
from torchembed.tables import (
    CacheStatistics,
    CacheStatisticsReader,
    ConvertedRows,
    CountedCaches,
    CountedTables,
    Delta,
    DeltaMark,
    GrowingTables,
    HashIndex,
    StatisticsReader,
    Table,
    TableGroup,
    TableGrowth,
    TableSet,
    TableStatistics,
    TieredGroup,
    check_at_least,
    check_own_rows,
    check_score,
    delta_on_all_ranks,
    read_delta,
    table_of,
)


class TableWeight(IndexInStateDict):
    """Holds the parameter ``weight`` of one table, which gives it a name in ``state_dict``."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table
        self.weight = table.parameter
        table.holder = self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            check_own_rows(self._table, param)
        super().register_parameter(name, param)
        if param is not None:
            self._table.parameter = param

    def forward(self) -> Tensor:
        return self.weight

    def held_weight(self) -> Tensor:
        """``weight``, after the hooks by which pruning computes it."""
        return self()


def _restore_after_load(module: "TableModule", incompatible_keys: object) -> None:
    module._growth.begin_anew()
    module._restore_groups()


class TableModule(nn.Module):
    """A module whose tables' parameters are views of their groups' flat weights.

    When a parameter is replaced (``load_state_dict(assign=True)``, ``copy.deepcopy``, unpickling,
    ``module.weight = ...``), :meth:`_restore_groups` follows, at the latest in the next lookup, and
    copies the new parameter into a flat weight. Copies start without an optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._statistics, self._growth = StatisticsReader(), TableGrowth()
        self._cache_statistics = CacheStatisticsReader()
        self.register_load_state_dict_post_hook(_restore_after_load)

    def _hold(
        self,
        tables: Iterable[Table],
        lookup_keys: Sequence[Hashable],
        device: torch.device | str | None,
    ) -> TableSet:
        """Allocate ``tables`` on ``device``, in groups of equal keys."""
        self._table_set = TableSet(tables, lookup_keys, device)
        return self._table_set

    @property
    def table_set(self) -> TableSet:
        """The tables and the groups that they form."""
        return self._table_set

    @property
    def admission_changes_tables(self) -> bool:
        """True if training may insert or evict rows, so that each trained batch must be admitted
        once, and no other."""
        groups = self._table_set.current_groups()
        return any(group.changes_on_admission for group in groups)

    @property
    def fetches_rows(self) -> bool:
        """True if rows of some table live outside the device, where training brings them."""
        return bool(self.tiered_groups())

    def tiered_groups(self) -> list[TieredGroup]:
        """The groups of tables on this rank whose rows live outside the device."""
        return [g for g in self._table_set.current_groups() if isinstance(g, TieredGroup)]

    @torch.no_grad()
    def write_back(self) -> None:
        """Write all rows that were trained on the device to the host, where tables live in host
        memory, and empty their cache; else nothing is to be done. Waits for a GPU.

        A state dict is up to date without it. Call it before ``weight`` of such a table, or its
        state in ``optimizer.state``, is read or changed in place, between steps.
        """
        for group in self._table_set.current_groups():
            group.write_back()
            group.forget_cached()

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

    def cache_statistics(self, *, wait: bool = False) -> dict[tuple[str, ...], CacheStatistics]:
        """Counts of the caches of tables in host memory, by the names of the tables that share one:
        rows found and missed, read ahead of a step and in it, written back and so on.

        Each rank has caches of its own, and gets the figures of these; it asks no other. Call it
        between steps. On a GPU it does not wait: each call gives what the copies begun by earlier
        ones have brought, of some steps ago, and the first calls give nothing. On a CPU the figures
        are of now.

        Args:
            wait: True for the figures of now on a GPU too, for which the call waits.
        """
        groups = self.tiered_groups()
        caches = {tuple(table.spec.name for table in group.tables): [group] for group in groups}
        device = groups[0].device if groups else torch.device("cpu")
        return self._cache_statistics.read(CountedCaches(caches, device), wait=wait)

    def counted_caches(self, name: str) -> CountedCaches[str]:
        """All caches of the module, on all ranks that share its tables, to be added up under
        ``name``; nothing where no table lives in host memory."""
        groups = self.tiered_groups()
        device = groups[0].device if groups else torch.device("cpu")
        return CountedCaches({name: groups} if groups else {}, device)

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
        keys = int64_keys(ids).flatten()
        for index, number in self._dynamic_parts(table):
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
        parts, keys = self._scored_parts(table), int64_keys(ids).flatten()
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

    def _dynamic_parts(self, table: str | None) -> list[tuple[HashIndex, int]]:
        """Of each part that is held here of the dynamic table of a name, None for the only one, the
        index and the number there; none where other ranks hold the table."""
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
            ValueError: for a mark of other tables, or a table without a ``deletion_log``.
        """
        group = self.counted_tables().group
        tables = self._table_set.tables
        if group is None:
            return read_delta(tables, since)
        return delta_on_all_ranks(lambda: read_delta(tables, since), group)

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        """Each table and the module whose ``weight`` is its parameter."""
        raise NotImplementedError

    def _find_parameters(self) -> None:
        """Point each table to the parameter that its module holds now."""
        for table, holder in self._holders():
            table.holder = holder  # type: ignore[assignment]
            table.parameter = _parameter_of(table, holder)

    def _restore_groups(self) -> None:
        """Form the groups anew, from the parameters that the modules hold now."""
        self._find_parameters()
        self._table_set.form_groups()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TableModule":
        for group in self.tiered_groups():
            group.check_convertible(fn)
        # What stands for recorded gradients under weight.grad would be converted by itself.
        for group in self._table_set.current_groups():
            if group.joined is not None:
                group.joined.check_nothing_pending()
            group.pending.hide()
        converted: dict[TableGroup, ConvertedRows] = {}

        def convert(tensor: Tensor) -> Tensor:
            # A group is converted whole, and its tables become views of the result. Converted one
            # by one, all rows would be copied once more into a flat weight.
            table = table_of(tensor)
            if table is None or table.owner is not self._table_set:
                return fn(tensor)
            group = table.group
            if group not in converted:
                converted[group] = group.converted(fn)
            return group.table_rows(converted[group].weight, table)

        super()._apply(convert, recurse)
        self._find_parameters()
        for group, rows in converted.items():
            group.convert(rows)
        for group in self._table_set.groups:
            group.pending.show()
        self._table_set.form_groups()
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._restore_groups()

    @torch.no_grad()
    def reset_rows(self, table: Table) -> None:
        """Give the rows of a table of the module their initial values again, and their optimizer
        state its own, in place; which ids have them stays."""
        table.fill_initial_rows()
        for state in table.group.stored_states:
            table.group.table_rows(state, table).fill_(table.group.initial_state)

    def reset_parameters(self) -> None:
        """Give every row its initial value again, in place."""
        self._table_set.fill_initial_rows()


def _parameter_of(table: Table, holder: nn.Module) -> nn.Parameter:
    """The parameter under ``weight``, or under a parametrization or pruning the one that it is
    computed from, which is recognized by its shape."""
    parameter = holder._parameters.get("weight")
    if isinstance(parameter, nn.Parameter):
        return parameter
    shape = table.num_rows, table.num_columns
    like = [p for p in holder.parameters() if tuple(p.shape) == shape]
    known = getattr(table, "parameter", None)
    if any(parameter is known for parameter in like):
        return known  # type: ignore[return-value]
    return like[0] if like else nn.Parameter(table.held_weight().detach(), requires_grad=False)


def as_on_bad_id(on_bad_id: OnBadId | str) -> OnBadId:
    """The enum for ``"raise"``, ``"clamp"`` or ``"zero"``."""
    if isinstance(on_bad_id, OnBadId):
        return on_bad_id
    try:
        return OnBadId[on_bad_id.upper()]
    except KeyError:
        raise ValueError(
            f'on_bad_id must be "raise", "clamp" or "zero", got {on_bad_id!r}'
        ) from None
