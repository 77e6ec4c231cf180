"""The tables of a run, beside what a checkpoint holds of them."""

import dataclasses
from collections.abc import Iterator, Mapping

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchembed.checkpoints.run.saved_state import SavedState
from torchembed.checkpoints.run.table_form import TableForm, form_key
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.modules.table_module import TableModule
from torchembed.optim.fused import FusedOptimizer
from torchembed.tables import DiskGroup, HashIndex, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTable:
    """A table of a run that a checkpoint holds."""

    names: tuple[str, ...]
    """Names of its parameter in the model; it was saved under the first."""
    module: TableModule
    table: Table
    form: TableForm | None
    """The form in which it was saved; None for a static table."""
    states: Mapping[str, str]
    """The entries of its optimizer state, by the names of states."""
    foreign_states: tuple[str, ...]
    """Entries of state by row that optimizers of torch keep, which cannot find rows by id."""
    num_rows: int | None
    """The rows with which each row of the checkpoint is the same row of the run: those of the
    table, or more, to which it can grow; None where no number of rows makes them that."""
    is_on_disk: bool
    """True where the run or the checkpoint has its rows in a database."""

    @property
    def weight(self) -> str:
        """The entry of its rows."""
        return f"model.{self.names[0]}"

    @property
    def is_alike(self) -> bool:
        """True where each row of the checkpoint is the same row of the table as it now is."""
        return self.num_rows == self.table.num_rows


def run_tables(run: TrainingRun, saved: SavedState) -> Iterator[RunTable]:
    """The tables of a run that this rank holds a part of, and that a checkpoint holds."""
    names: dict[int, list[str]] = {}
    for name, parameter in run.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    modules = [module for module in run.model.modules() if isinstance(module, TableModule)]
    for module in modules:
        for table in module.table_set.tables:
            of_table = tuple(names.get(id(table.parameter), ()))
            if not of_table or f"model.{of_table[0]}" not in saved.entries:
                continue
            if not of_table[0].endswith("weight"):  # what a parametrization computes it from
                continue
            key, form = form_key(of_table[0]), None
            if key in saved.entries:
                form = _with_own_seed(table, TableForm.parse(saved.tensors.whole(key)))
            states, foreign = _states(run, table, of_table[0], saved)
            is_saved_on_disk = f"model.{of_table[0]}" in saved.tensors.databases
            yield RunTable(
                names=of_table,
                module=module,
                table=table,
                form=form,
                states=states,
                foreign_states=foreign,
                num_rows=_rows_alike(table, form, of_table[0], saved),
                is_on_disk=is_saved_on_disk or isinstance(table.group, DiskGroup),
            )


def _states(
    run: TrainingRun, table: Table, name: str, saved: SavedState
) -> tuple[dict[str, str], tuple[str, ...]]:
    """``states`` and ``foreign_states`` of a :class:`MovedTable`."""
    states, foreign = {}, []
    for index, optimizer in enumerate(run.optimizers):
        of_optimizer = (p for group in optimizer.param_groups for p in group["params"])
        if not any(parameter is table.parameter for parameter in of_optimizer):
            continue
        start = f"optimizers.{index}.state.{name}."
        if isinstance(optimizer, FusedOptimizer):
            states |= {state: f"{start}{state}" for state in optimizer.state_names}
        else:
            size = saved.tensors.size(f"model.{name}")
            foreign += [
                key
                for key, entry in saved.entries.items()
                if key.startswith(start)
                and isinstance(entry, TensorStorageMetadata)
                and entry.size == size
            ]
    return states, tuple(foreign)


def _with_own_seed(table: Table, form: TableForm) -> TableForm:
    """A saved form, of the run's seed where any will do: a module of one table draws its own where
    none is given, and rows that have their values do not depend on it."""
    own = TableForm.of(table)
    if own is None or not table.may_join:
        return form
    return form._replace(key=own.key)


def _rows_alike(table: Table, form: TableForm | None, name: str, saved: SavedState) -> int | None:
    """The rows with which each row of the checkpoint is the same row of the run: those of the
    table, or more, to which it can grow; None where no number of rows makes them that."""
    if form is None:
        return table.num_rows if TableForm.of(table) is None else None
    is_in_reach = table.num_rows <= form.share_rows <= table.max_rows
    if not is_in_reach or form != TableForm.of(table, form.share_rows):
        return None
    # What a policy of admission keeps has a size of its own.
    index, contents = table.group.index, table.index_contents()
    assert isinstance(index, HashIndex)
    kept = (
        () if index.admission is None else index.admission.contents(table.group.tables.index(table))
    )
    start = f"model.{name}".removesuffix("weight") + "index."
    sizes = {f"{start}{n}": table.contents_as_global(contents[n]).shape for n in kept}
    is_alike = all(saved.tensors.size(k) == size for k, size in sizes.items() if k in saved.entries)
    return form.share_rows if is_alike else None
