"""Tables that a checkpoint holds in other rows than the run: they grow first, and where that does
not make the rows the same ones, they are loaded by id, in chunks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchembed.checkpoints import save_planner
from torchembed.checkpoints.saved_state import SavedState
from torchembed.checkpoints.table_form import TableForm, form_key
from torchembed.checkpoints.training_run import TrainingRun
from torchembed.modules.table_module import TableModule
from torchembed.optim.fused import FusedOptimizer
from torchembed.sharding.transport.global_rows import are_here
from torchembed.tables import (
    CountMinSketch,
    HashIndex,
    RowChunk,
    Table,
    clear_ids,
    grow_to,
    row_ranges,
    table_states,
    take_over,
    write_rows,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovedTable:
    """A table of which a checkpoint holds the rows by id, on other ranks, in another capacity, or
    as a static table where the run has a dynamic one, or the other way round."""

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
    """The rows to which the table can grow so that each saved row is the same row of it; None where
    rows are loaded by id."""

    @property
    def weight(self) -> str:
        """The entry of its rows."""
        return f"model.{self.names[0]}"

    @property
    def contents(self) -> str:
        """The beginning of the entries of its ids."""
        return self.weight.removesuffix("weight") + "index."

    def holds(self, key: str) -> bool:
        """True for an entry of the checkpoint or the run that is loaded with the table's rows."""
        weights = [f"model.{name}" for name in self.names]
        contents = tuple(weight.removesuffix("weight") + "index." for weight in weights)
        states = *self.states.values(), *self.foreign_states
        return key in weights or key.startswith(contents) or key in states

    def mismatches(self, saved: SavedState) -> Iterator[str]:
        """Reasons why the table cannot be loaded."""
        spec, form, own = self.table.spec, self.form, TableForm.of(self.table)
        size, dtype = saved.tensors.size(self.weight), saved.tensors.dtype(self.weight)
        if size[1] != spec.dim:
            yield f"{self.weight} has {size[1]} columns, and {spec.dim} in the run"
        if dtype != spec.dtype:
            yield f"{self.weight} has dtype {dtype}, and {spec.dtype} in the run"
        if form is not None and own is not None:
            if form.key != own.key:
                yield f"{self.weight} is of a table of another name or seed"
            if form.eviction != own.eviction:
                yield f"{self.weight} evicts by {form.eviction}, and by {own.eviction} in the run"
            if form.admission != own.admission:
                yield (
                    f"{self.weight} admits ids by {form.admission}, and by {own.admission} in the "
                    "run"
                )
            if form.num_hashed_rows != own.num_hashed_rows:
                yield (
                    f"{self.weight} has {form.num_hashed_rows} hashed rows, and "
                    f"{own.num_hashed_rows} in the run"
                )
            yield from self._sketch_mismatches(form, saved)
        for key in self.foreign_states if self.num_rows is None else ():
            yield (
                f"{key} is state of an optimizer of torch, which follows no rows by id; load it on "
                "as many ranks, under the same placement and capacity"
            )
        for key in self.states.values():
            if key not in saved.entries:
                yield f"{key} was not saved"
            elif tuple(saved.tensors.size(key)) not in (tuple(size), tuple(size[:1])):
                yield f"{key} has shape {list(saved.tensors.size(key))}, of rows {list(size)}"
        if form is not None and own is None:
            yield from self._ids_outside(saved)

    def _sketch_mismatches(self, form: TableForm, saved: SavedState) -> Iterator[str]:
        own = self.table.index_contents().get("sketch")
        key = f"{self.contents}sketch"
        if own is not None and key in saved.entries:
            depth, width = saved.tensors.size(key)
            if (depth // form.num_shares, width) != tuple(own.shape):
                yield (
                    f"{key} has shape {[depth // form.num_shares, width]}, and {list(own.shape)} "
                    "in the run"
                )

    def _ids_outside(self, saved: SavedState) -> Iterator[str]:
        num_rows, num_outside, an_id = self.table.spec.num_rows, 0, 0
        for rows in self._ranges(saved, 1):
            ids, _ = self._ids(saved, rows)
            outside = ids[(ids < 0) | (ids >= num_rows)]
            if len(outside):
                num_outside, an_id = num_outside + len(outside), int(outside[0])
        if num_outside:
            yield (
                f"{self.weight} has {num_outside} ids outside the {num_rows} rows of the run's "
                f"static table, {an_id} for one"
            )

    def grow(self) -> None:
        """Let the table have :attr:`num_rows`.

        Raises:
            torch.OutOfMemoryError: where there is no memory for them; nothing has changed.
        """
        assert self.num_rows is not None
        grow_to(self.table, self.num_rows)

    @torch.no_grad()
    def load(self, saved: SavedState) -> int:
        """Give the table the ids, rows and states that were saved, and no others.

        Returns:
            How many ids found no row here, since those of greater scores filled the table; 0 on
            ranks that hold later columns of them.
        """
        index, num_left_out = self.table.group.index, 0
        if self.table.is_sharded:  # parts have equally many rows, also where no saved id belongs
            grow_to(self.table, self.table.max_rows)
        if isinstance(index, HashIndex):
            clear_ids(self.table)
        if not isinstance(index, HashIndex) or index.shared is not None:
            self.module.reset_rows(self.table)
        for chunk in self._chunks(saved):
            num_left_out += write_rows(self.table, chunk)
        if not isinstance(index, HashIndex):
            return 0
        clock = index.clock.last
        if self.form is not None:
            self._load_hashed_rows(self.form, saved)
            self._load_admission(self.form, index, saved)
            clock = saved.tensors.whole(f"{self.contents}clock").amax(0, keepdim=True)
        take_over(index, self.table, clock)
        return 0 if self.table.first_column else num_left_out

    def _chunks(self, saved: SavedState) -> Iterator[RowChunk]:
        """The saved rows whose ids belong here, of the columns that are here."""
        tensors, table = saved.tensors, self.table
        columns = range(table.first_column, table.first_column + table.num_columns)
        row_bytes = table.spec.dim * tensors.dtype(self.weight).itemsize
        for rows in self._ranges(saved, row_bytes):
            ids, places = self._ids(saved, rows)
            is_here = self._is_here(ids)
            if not is_here.any():
                continue
            ids, places = ids[is_here], places[is_here]

            def of_ids(key: str, rows: range = rows, places: Tensor = places) -> Tensor:
                is_divided = len(tensors.size(key)) > 1
                return tensors.rows(key, rows, columns if is_divided else None)[places]

            scores = touched = None
            if self.form is None:
                index = table.group.index
                if isinstance(index, HashIndex):  # last used now, so that none expires at once
                    touched = index.clock.last.cpu().clamp_min(1).expand_as(ids)
            else:
                touched = of_ids(f"{self.contents}touched")
                has_scores = f"{self.contents}scores" in saved.entries
                scores = of_ids(f"{self.contents}scores") if has_scores else touched
            of_states = {name: of_ids(key) for name, key in self.states.items()}
            yield RowChunk(ids, of_ids(self.weight), of_states, scores, touched)
        tensors.forget()

    def _ranges(self, saved: SavedState, row_bytes: int) -> Iterator[range]:
        """The saved rows that may be of ids that belong here, some at a time."""
        share_rows, shares = saved.tensors.size(self.weight)[0], [0]
        if self.form is not None:
            share_rows, shares = self.form.share_rows, self._shares(self.form)
        for share in shares:
            for part in row_ranges(share_rows, row_bytes, save_planner.CHUNK_BYTES):
                yield range(share * share_rows + part.start, share * share_rows + part.stop)

    def _shares(self, form: TableForm) -> list[int]:
        """The saved shares that may hold ids that belong here: both are ranges of a hash."""
        num_saved, (place, num_shares) = form.num_shares, self.table.id_share
        return [
            share
            for share in range(num_saved)
            if share * num_shares < (place + 1) * num_saved
            and place * num_saved < (share + 1) * num_shares
        ]

    def _ids(self, saved: SavedState, rows: range) -> tuple[Tensor, Tensor]:
        """The ids in some saved rows, and their places among these, int64 ``[n]`` each."""
        if self.form is None:
            return torch.arange(rows.start, rows.stop), torch.arange(len(rows))
        places = saved.tensors.rows(f"{self.contents}digests", rows).nonzero().flatten()
        return saved.tensors.rows(f"{self.contents}ids", rows)[places], places

    def _is_here(self, ids: Tensor) -> Tensor:
        return are_here(self.table, ids)

    def _load_hashed_rows(self, form: TableForm, saved: SavedState) -> None:
        """Give the rows that ids share the mean of those of the shares that held the ids: their
        values, where they were one share's."""
        num_rows, shares = form.num_hashed_rows, self._shares(form)
        if not num_rows:
            return
        columns = range(self.table.first_column, self.table.first_column + self.table.num_columns)
        for key, own in (
            (self.weight, self.table.parameter.data),
            *((self.states[name], state) for name, state in table_states(self.table).items()),
        ):
            total = torch.zeros_like(own[-num_rows:], dtype=torch.float64, device="cpu")
            for share in shares:
                end = (share + 1) * form.share_rows
                total += saved.tensors.rows(
                    key, range(end - num_rows, end), columns if own.dim() > 1 else None
                )
            own[-num_rows:] = total.div_(len(shares)).to(own)

    def _load_admission(self, form: TableForm, index: HashIndex, saved: SavedState) -> None:
        admission, number = index.admission, self.table.group.tables.index(self.table)
        if admission is None:
            return
        keys = {name: f"{self.contents}{name}" for name in admission.contents(number)}
        for share in self._shares(form) if keys else ():
            contents = {}
            for name, key in keys.items():
                num_rows = saved.tensors.size(key)[0] // form.num_shares
                rows = range(share * num_rows, (share + 1) * num_rows)
                contents[name] = saved.tensors.rows(key, rows)
            admission.merge(number, contents, self._is_here)
        saved.tensors.forget()


def moved_tables(run: TrainingRun, saved: SavedState) -> list[MovedTable]:
    """The dynamic tables of a run, or of a checkpoint, that lie in other rows in the other one."""
    names: dict[int, list[str]] = {}
    for name, parameter in run.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
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
            rows = _rows_alike(table, form, of_table[0], saved)
            if rows == table.num_rows:
                continue
            states, foreign = _states(run, table, of_table[0], saved)
            moved = MovedTable(
                names=of_table,
                module=module,
                table=table,
                form=form,
                states=states,
                foreign_states=foreign,
                num_rows=rows,
            )
            found.append(moved)
    return found


def restart_clocks(moved: Sequence[MovedTable]) -> None:
    """Let groups all of whose tables are loaded by id count batches from the saved ones on, however
    many the run has trained."""
    tables = [of_moved.table for of_moved in moved]
    for group in {id(table.group): table.group for table in tables}.values():
        if isinstance(group.index, HashIndex) and all(table in tables for table in group.tables):
            group.index.clock.numbers.zero_()


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
    none is given, and rows that have their values do not depend on it. Sketches do."""
    own = TableForm.of(table)
    if own is None or not table.may_join or form.admission == CountMinSketch.__name__:
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
