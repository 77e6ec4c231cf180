"""One level of rows: a store that may be away for a while."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchembed.serving.levels.level_rules import LevelRules, LoadedPart
from torchembed.serving.levels.missed_keys import MissedKeys
from torchembed.serving.levels.served_table import ServedTable
from torchembed.serving.levels.stale_marks import StaleMarks
from torchembed.stores import RowStore, RowStoreError, RowTable

_log = logging.getLogger(__name__)

FAULTS = (RowStoreError, OSError)
"""What a store raises where it cannot do what was asked, whatever that was."""
_PATIENCE_SECONDS = 0.1
"""For so long a call waits for a level that may be back."""
_EMPTIED_ROWS = 1 << 16
"""Rows that are deleted at a time where a table is emptied."""


@dataclass(frozen=True, kw_only=True)
class LevelStatistics:
    """Counts of a level since it was made."""

    name: str
    num_hits: int
    """Rows that it answered, each once a lookup."""
    num_promoted_rows: int
    """Rows that it was given since it lacked what a lower level had."""
    num_faults: int
    """Calls that raised."""
    num_missed_keys: int
    """Keys whose updates it has missed, and that will be deleted from it before it is read again;
    -1 where there were too many, and whole tables will be emptied."""
    is_away: bool
    """True while it is left out."""


class Level:
    """A store whose faults are no one else's: after one it is left out for some time.

    What is written or deleted meanwhile it has missed. Before it is used again, the keys of all
    that are deleted from it, so that it never answers what is no longer so. Whether it is back a
    thread finds out: a store that answers late holds up the one call that finds it so, and no
    later one.

    Args:
        name: in statistics and in the log.
        store: belongs to the caller, who closes it.
        tables: those that are served.
        rules: what it takes.
        back_off_seconds: for how long it is left out after a fault.
        max_missed_keys: the most keys that it remembers having missed. Beyond that number it is to
            be emptied of their tables.
        marks: where it is kept that it has missed updates, for the next process, which then empties
            it of their tables; None where its rows do not outlive this one.
    """

    def __init__(
        self,
        name: str,
        store: RowStore,
        tables: Sequence[ServedTable],
        rules: LevelRules,
        *,
        back_off_seconds: float,
        max_missed_keys: int,
        marks: StaleMarks | None = None,
    ) -> None:
        self.name, self.rules = name, rules
        self._store, self._served = store, tables
        self._back_off_seconds = back_off_seconds
        self._lock = threading.Lock()
        """Guards all that follows; not held while the store is called."""
        self._opened: dict[str, RowTable] = {}
        self._is_away = self._is_returning = False
        self._has_answered = False
        """True where the store, being away, did what it was asked to do on its return."""
        self._retry_at = 0.0
        self._num_hits = self._num_promoted = self._num_faults = 0
        self._marks, self._marked = marks, set[str]()
        if marks is not None:
            self._marked = marks.tables(table.name for table in tables)
            self._is_away = bool(self._marked)
        self._missed = MissedKeys(max_missed_keys, self._marked)

    def read(self, table: str, keys: Tensor, lines: Tensor) -> Tensor | None:
        """As :meth:`RowTable.read`; None where the level is away."""
        if not self._is_usable():
            return None
        try:
            found = self._table(table).read(keys, lines)
        except FAULTS as error:
            self._note_fault(error)
            return None
        num_found = int(found.sum())
        with self._lock:
            self._num_hits += num_found
        return found

    def promote(self, table: str, keys: Tensor, lines: Tensor) -> None:
        """Write rows that a lower level had; where the level is away it goes without them."""
        if not len(keys) or not self._is_usable():
            return
        try:
            self._table(table).write(keys, lines)
        except FAULTS as error:
            # It may have taken some of them, which are what the lower level has.
            self._note_fault(error)
            return
        with self._lock:
            self._num_promoted += len(keys)

    def update(self, table: str, keys: Tensor, lines: Tensor | None) -> None:
        """Write ``lines``, or where there are none delete ``keys``, now or when it is back."""
        if not len(keys):
            return
        if not self._note_if_away(table, keys):
            try:
                self._change(table, keys, lines)
            except FAULTS as error:
                self._note_missed(table, keys)
                self._note_fault(error)

    def load(self, table: str, keys: Tensor, lines: Tensor, part: LoadedPart) -> None:
        """Write those of the lines of a table that is being loaded that are within the level's
        share, and delete the others, now or when it is back."""
        if self.rules.initial_share == 0 and not self.rules.is_own:
            return
        num_taken = self.rules.num_taken(part, len(keys))
        self.update(table, keys[:num_taken], lines[:num_taken])
        self.update(table, keys[num_taken:], None)

    def must_update(self, table: str, keys: Tensor, lines: Tensor | None) -> None:
        """Write ``lines``, or where there are none delete ``keys``.

        Raises:
            RowStoreError, OSError: where the store cannot; it is as it was then. It is read all
                the same, as one can be whose disk is full.
        """
        if not len(keys):
            return
        try:
            self._change(table, keys, lines)
        except FAULTS:
            with self._lock:
                self._num_faults += 1
            raise

    def drop(self, table: str) -> None:
        """Have the store let go of a table that was emptied. Where the level is away, what it keeps
        of an empty table stays."""
        if not self._is_usable():
            return
        try:
            self._table(table).drop()
        except FAULTS as error:
            self._note_fault(error)
            return
        self._opened.pop(table, None)

    def table(self, name: str) -> RowTable:
        """The table ``name`` of the store.

        Raises:
            RowStoreError, OSError: where the store cannot be reached.
        """
        return self._table(name)

    def sync(self) -> None:
        """As :meth:`RowStore.sync`."""
        self._store.sync()

    def statistics(self) -> LevelStatistics:
        """The counts of now."""
        with self._lock:
            return LevelStatistics(
                name=self.name,
                num_hits=self._num_hits,
                num_promoted_rows=self._num_promoted,
                num_faults=self._num_faults,
                num_missed_keys=self._missed.num_keys,
                is_away=self._is_away,
            )

    def _table(self, name: str) -> RowTable:
        # Opened at the first use, since the store may be away when the level is made.
        table = self._opened.get(name)
        if table is None:
            line_bytes = {table.name: table.line_bytes for table in self._served}[name]
            table = self._opened[name] = self._store.table(name, line_bytes)
        return table

    def _change(self, table: str, keys: Tensor, lines: Tensor | None) -> None:
        if lines is None:
            self._table(table).delete(keys)
            return
        num_rows = self.rules.max_batch_rows or len(keys)
        for some_keys, some_lines in zip(keys.split(num_rows), lines.split(num_rows), strict=True):
            self._table(table).write(some_keys, some_lines)

    def _is_usable(self) -> bool:
        """True if the level may be called; where it was away long enough, once it has what it
        missed, which is waited for a moment."""
        with self._lock:
            if not self._is_away:
                return True
            if self._is_returning or time.monotonic() < self._retry_at:
                return False
            self._is_returning = True
        returning = threading.Thread(target=self._try_return, name="returning level", daemon=True)
        returning.start()
        returning.join(_PATIENCE_SECONDS)
        with self._lock:
            return not self._is_away

    def _try_return(self) -> None:
        try:
            self._return()
        finally:
            with self._lock:
                self._is_returning = False

    def _return(self) -> None:
        """Delete all that was missed; where that is done the level is used again."""
        try:
            while not self._ends_being_away():
                self._delete_missed()
        except FAULTS as error:
            self._note_fault(error)

    def _delete_missed(self) -> None:
        with self._lock:
            missed = self._missed.take()
        is_deleted = False
        try:
            self._store.tables()
            for name in missed.whole:
                self._empty(self._table(name))
            for name, keys in missed.keys.items():
                self._table(name).delete(torch.tensor(sorted(keys), dtype=torch.int64))
            is_deleted = True
        finally:
            with self._lock:
                self._has_answered = is_deleted
                self._missed.settle(is_deleted=is_deleted)

    def _ends_being_away(self) -> bool:
        """True where nothing is missed, and the level is used from now on."""
        with self._lock:
            if not self._has_answered or self._missed:
                return False
            if self._marks is not None and self._marked:
                self._marks.remove(self._marked)
                self._marked = set()
            self._is_away = self._has_answered = False
        _log.warning("level %s is used again", self.name)
        return True

    def _empty(self, table: RowTable) -> None:
        for chunk in table.chunks(_EMPTIED_ROWS):
            table.delete(chunk.keys)

    def _note_if_away(self, table: str, keys: Tensor) -> bool:
        """Note that ``keys`` are missed where the level is away, which is what it returns."""
        # Asked first, so that an update brings it back as a lookup does.
        self._is_usable()
        with self._lock:
            if self._is_away:
                self._miss(table, keys)
            return self._is_away

    def _note_missed(self, table: str, keys: Tensor) -> None:
        with self._lock:
            self._miss(table, keys)

    def _miss(self, table: str, keys: Tensor) -> None:
        if self._marks is not None and table not in self._marked:
            self._marks.add(table)
            self._marked.add(table)
        self._missed.add(table, keys.tolist())

    def _note_fault(self, error: Exception) -> None:
        with self._lock:
            self._num_faults += 1
            was_away = self._is_away
            self._is_away, self._has_answered = True, False
            self._retry_at = time.monotonic() + self._back_off_seconds
        if not was_away:
            _log.warning(
                "level %s is left out for %s s, and tried again then: %s",
                self.name,
                self._back_off_seconds,
                error,
            )
