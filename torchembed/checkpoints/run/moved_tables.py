"""Tables that a checkpoint holds in other rows than the run: they grow first, and where that does
not make the rows the same ones, they are loaded by id, in chunks."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchembed.checkpoints.files import save_planner
from torchembed.checkpoints.run.run_tables import RunTable
from torchembed.checkpoints.run.saved_state import SavedState
from torchembed.checkpoints.run.table_form import TableForm
from torchembed.sharding.transport.global_rows import are_here
from torchembed.tables import (
    HashIndex,
    RowChunk,
    clear_ids,
    grow_to,
    row_ranges,
    take_over,
    write_numbered_rows,
    write_rows,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovedTable(RunTable):
    """A table of which a checkpoint holds the rows by id, on other ranks, in another capacity, or
    as a static table where the run has a dynamic one, or the other way round.

    It grows where :attr:`num_rows` says so, and is loaded by id where that is None.
    """

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
        table = self.table
        columns = range(table.first_column, table.first_column + table.num_columns)

        def mean(key: str) -> Tensor:
            is_divided = len(saved.tensors.size(key)) > 1
            total = torch.zeros((), dtype=torch.float64)
            for share in shares:
                end = (share + 1) * form.share_rows
                rows = range(end - num_rows, end)
                total = (
                    total + saved.tensors.rows(key, rows, columns if is_divided else None).double()
                )
            return total.div_(len(shares))

        states = {name: mean(key) for name, key in self.states.items()}
        rows = torch.arange(table.num_rows - num_rows, table.num_rows)
        write_numbered_rows(table, rows, mean(self.weight), states)

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


def moved_tables(tables: Iterable[RunTable]) -> list[MovedTable]:
    """The dynamic tables of a run, or of a checkpoint, that lie in other rows in the other one."""
    moved = []
    for found in tables:
        if not found.is_alike:
            # What is not in memory on both sides is not read in place, however large.
            num_rows = None if found.is_on_disk else found.num_rows
            moved.append(MovedTable(**{**vars(found), "num_rows": num_rows}))
    return moved


def restart_clocks(moved: Sequence[MovedTable]) -> None:
    """Let groups all of whose tables are loaded by id count batches from the saved ones on, however
    many the run has trained."""
    tables = [of_moved.table for of_moved in moved]
    for group in {id(table.group): table.group for table in tables}.values():
        if isinstance(group.index, HashIndex) and all(table in tables for table in group.tables):
            group.index.clock.numbers.zero_()
