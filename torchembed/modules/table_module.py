"""The base of the modules that hold embedding tables."""

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from torchembed.core.types import OnBadId
from torchembed.modules.dynamic_table_operations import DynamicTableOperations
from torchembed.modules.index_in_state_dict import IndexInStateDict
from torchembed.tables import (
    CacheStatistics,
    CacheStatisticsReader,
    ConvertedRows,
    CountedCaches,
    DiskGroup,
    Table,
    TableGroup,
    TableSet,
    TieredGroup,
    check_own_rows,
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

    def extra_repr(self) -> str:
        return f"{self._table.num_rows}, {self._table.num_columns}"

    def held_weight(self) -> Tensor:
        """``weight``, after the hooks by which pruning computes it."""
        return self()


def _restore_after_load(module: "TableModule", incompatible_keys: object) -> None:
    module._growth.begin_anew()
    module._restore_groups()
    module.note_moved_ids()


class TableModule(DynamicTableOperations):
    """A module whose tables' parameters are views of their groups' flat weights.

    When a parameter is replaced (``load_state_dict(assign=True)``, ``copy.deepcopy``, unpickling,
    ``module.weight = ...``), :meth:`_restore_groups` follows, at the latest in the next lookup, and
    copies the new parameter into a flat weight. Copies start without an optimizer.
    """

    def __init__(self) -> None:
        super().__init__()
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
    def fetches_rows(self) -> bool:
        """True if rows of some table live outside the device, where training brings them."""
        return bool(self.tiered_groups())

    def tiered_groups(self) -> list[TieredGroup]:
        """The groups of tables on this rank whose rows live outside the device."""
        return [g for g in self._table_set.current_groups() if isinstance(g, TieredGroup)]

    def disk_groups(self) -> list[DiskGroup]:
        """The groups of tables on this rank whose rows are on disk."""
        return [group for group in self.tiered_groups() if isinstance(group, DiskGroup)]

    def wait_for_lines(self) -> None:
        """Wait until host memory holds the rows on disk of all batches that were admitted.

        Raises:
            Exception: what reading or writing the disk failed with.
        """
        for group in self.disk_groups():
            group.wait_for_lines()

    @torch.no_grad()
    def release_prepared(self) -> None:
        """Let go of the rows of batches that were prepared ahead of their step, none of which is
        under way any more. Never waits for a GPU."""
        for group in self._table_set.current_groups():
            if group.changes_on_admission and not group.weight.is_meta:
                group.release_prepared()

    @torch.no_grad()
    def release_forwards(self) -> None:
        """Let go of the rows of forwards that no update will train, where a fused optimizer trains
        the tables. Never waits for a GPU."""
        for group in self._table_set.current_groups():
            if group.changes_on_admission and group.rule is not None and not group.weight.is_meta:
                group.release_forwards()

    def stop_threads(self) -> None:
        """End the threads that read and write tables on disk, which begin anew where they are
        needed. No step may be under way."""
        for group in self.disk_groups():
            group.stop_thread()

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
        table.group.reset_states(table)

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
