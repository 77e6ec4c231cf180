"""Loading of rows of versions into the levels, and a record of those that are there."""

import hashlib
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints import RowSource
from torchembed.serving.levels import LeveledLookup, LoadedPart
from torchembed.stores import RowStore

_VERSIONS = "torchembed.loaded_rows"
_CONTENTS = "torchembed.loaded_contents"
_BEING_WRITTEN = 1
"""In place of the content of rows that a load has begun to replace."""
_CHUNK_ROWS = 1 << 18


class RowsOf(NamedTuple):
    """Rows of a table in stores.

    Attributes:
        model: that they were loaded for.
        store_name: of the table in its stores.
    """

    model: str
    store_name: str


class RowLoader:
    """Loads rows of versions, and knows which are there.

    Rows are of a version once they were loaded whole from it, or updated by one that came to this
    version; those of a version or of a later one are not loaded again, unless the folder of the
    version has other rows by now, or a load that was to replace them has failed.

    Args:
        records: the store that keeps rows when the process ends, where the versions and contents
            of rows are kept likewise; None where no rows outlive it.
        is_loading: False where the stores have all rows, whatever is on record.
    """

    def __init__(self, records: RowStore | None, *, is_loading: bool = True) -> None:
        self._is_loading = is_loading
        self._versions = _Numbers(records, _VERSIONS)
        self._contents = _Numbers(records, _CONTENTS)
        self._present: set[str] = set()
        """Tables, by their names in stores, that levels of this process have their share of."""
        self._lock = threading.Lock()

    def version(self, rows: RowsOf) -> int:
        """The version of rows, 0 where there are none."""
        with self._lock:
            return self._versions.read(rows)

    def has_rows_of(self, store_name: str) -> bool:
        """True where levels have rows of a table, by its name in stores, since it was loaded."""
        return store_name in self._present

    def is_due(
        self, rows: RowsOf, version: int, content: int | None, lookup: LeveledLookup
    ) -> bool:
        """True where :meth:`load` is to write rows of a version.

        A static cache has no store that may have the rows: it is loaded from the folder each time.

        Args:
            content: as of :meth:`note_loaded`.
        """
        if lookup.levels is None:
            return True
        with self._lock:
            known, earlier = self._contents.read(rows), self._versions.read(rows)
        is_other = earlier == version and None is not content != known != 0
        return self._is_loading and (earlier < version or is_other)

    def note_begun(self, rows: RowsOf) -> None:
        """Have it on record that rows are to be replaced. That comes before the first :meth:`load`
        of a version: where one of its tables fails, all are loaded again, whichever version is."""
        with self._lock:
            if self._versions.read(rows):
                self._contents.write(rows, _BEING_WRITTEN)

    def load(self, rows: RowsOf, source: RowSource, lookup: LeveledLookup) -> None:
        """Write the rows of a version through a lookup.

        Rows that the version does not have are deleted, where earlier ones of the model were loaded
        under that name.

        Args:
            source: of the rows of the version.

        Raises:
            ValueError, OSError: where the rows cannot be read; where a static cache has no room, or
                other rows of that name.
            RowStoreError, OSError: where they cannot be stored. Loading again does no harm.
        """
        keys = _write(source, rows.store_name, lookup)
        if lookup.levels is None:
            return
        self._present.add(rows.store_name)
        if self.version(rows):
            _delete_others(keys, rows.store_name, lookup)
        lookup.levels.sync()

    def note_loaded(self, rows: RowsOf, version: int, content: int | None) -> None:
        """Have it on record that rows, of a table without a static cache, are whole, and of
        ``version``.

        Args:
            content: a number above 1 that other rows of the version would not have; None where
                nothing tells them apart.
        """
        with self._lock:
            self._contents.write(rows, content or 0)
        self.note(rows, version)

    def take(self, rows: RowsOf, lookup: LeveledLookup) -> None:
        """Take rows that the lowest level has: levels that begin empty with each process get their
        share of them, and a cache that holds whole tables all.

        Raises:
            RowStoreError, OSError: where they cannot be read.
        """
        assert lookup.levels is not None
        if rows.store_name not in self._present:
            lookup.levels.fill(rows.store_name)
            self._present.add(rows.store_name)
        lookup.read_all(rows.store_name)

    def note(self, rows: RowsOf, version: int) -> None:
        """Have it on record that rows are of ``version``, unless they are of a later one."""
        with self._lock:
            if version > self._versions.read(rows):
                self._versions.write(rows, version)

    def forget(self, rows: RowsOf) -> None:
        """Delete the record of rows. That comes before :meth:`delete`: rows on record are whole."""
        with self._lock:
            self._versions.delete(rows)
            self._contents.delete(rows)

    def delete(self, rows: RowsOf, lookup: LeveledLookup) -> None:
        """Delete a table that nothing looks up any more; that of a static cache ends with its
        lookup."""
        if lookup.levels is not None:
            # Rows that lookups missed would be written behind, into a table that is made anew.
            lookup.wait_for_insertions()
            _delete_others(torch.empty(0, dtype=torch.int64), rows.store_name, lookup)
            lookup.levels.drop(rows.store_name)
            self._present.discard(rows.store_name)


class _Numbers:
    """A number for each of some rows, also in a store; 0 for those that have none."""

    def __init__(self, records: RowStore | None, name: str) -> None:
        self._table = None if records is None else records.table(name, 8)
        self._known: dict[RowsOf, int] = {}

    def read(self, rows: RowsOf) -> int:
        found = self._known.get(rows)
        if found is None and self._table is not None:
            line = torch.zeros(1, 8, dtype=torch.uint8)
            self._table.read(_key(rows), line)
            found = self._known[rows] = int(line.view(torch.int64))
        return found or 0

    def write(self, rows: RowsOf, number: int) -> None:
        if self._table is not None:
            line = torch.tensor([[number]], dtype=torch.int64).view(torch.uint8)
            self._table.write(_key(rows), line)
        self._known[rows] = number

    def delete(self, rows: RowsOf) -> None:
        if self._table is not None:
            self._table.delete(_key(rows))
        self._known.pop(rows, None)


def _key(rows: RowsOf) -> Tensor:
    text = f"{rows.model}\n{rows.store_name}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True)])


def _write(source: RowSource, store_name: str, lookup: LeveledLookup) -> Tensor:
    """Write all rows of a source; returns their keys, ascending."""
    keys, begin = [], 0
    for chunk in source:
        part = LoadedPart(begin, source.num_rows)
        lookup.load_rows(store_name, chunk.keys, chunk.rows, part)
        keys.append(chunk.keys)
        begin += len(chunk.keys)
    return torch.cat(keys).sort().values


def _delete_others(keys: Tensor, store_name: str, lookup: LeveledLookup) -> None:
    """Delete the rows whose keys are not among ``keys``, ascending."""
    assert lookup.levels is not None
    (dim,) = (table.dim for table in lookup.levels.tables if table.name == store_name)
    for chunk in lookup.levels.chunks(store_name, _CHUNK_ROWS):
        places = torch.searchsorted(keys, chunk.keys).clamp(max=max(0, len(keys) - 1))
        is_kept = keys[places] == chunk.keys if len(keys) else torch.zeros(len(chunk.keys)).bool()
        lookup.apply_rows(store_name, keys[:0], torch.empty(0, dim), chunk.keys[~is_kept])
