"""Rows below the cache: stores one below the other."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.serving.levels.level import Level, LevelStatistics
from torchembed.serving.levels.level_rules import LevelRules, LoadedPart
from torchembed.serving.levels.served_table import ServedTable, distinct_tables, positions_of
from torchembed.serving.levels.stale_marks import StaleMarks
from torchembed.serving.levels.update_log import Fetch, UpdateLog
from torchembed.stores import LineChunk, RedisStore, RowStore

_WRITTEN_BYTES = 1 << 28
"""Bytes of lines that one call of a store writes."""
_ANY_NUMBER = 1 << 62
_FILLED_BYTES = 1 << 24
"""Bytes of lines that are copied from one level to another at a time."""


class ReadLines(NamedTuple):
    """Lines read from the levels."""

    lines: Tensor
    """uint8 ``[n, line_bytes]``; those of keys without one hold nothing of use."""
    is_found: Tensor
    """bool ``[n]``: False where no level has a line."""
    is_complete: bool
    """False where a level was left out, which may have lines that were not found."""


class RowLevels:
    """The rows of served tables in stores one below the other, such as memory, Redis and RocksDB.

    A row is read from the uppermost store that has it, and promoted to those above that lack it.
    Rows are written and deleted in all of them, the lowest first, which holds all rows. Any number
    of threads may use it at once.

    A store that raises ``RowStoreError`` or ``OSError`` is left out for some time, and then tried
    again; the others answer meanwhile. What it missed is deleted from it before it is used again.
    Only writing to the lowest store must succeed: where it does not, nothing is written above it
    either, and the error is raised for the caller to try again. A Redis above it that comes back
    with older rows than it had is emptied first, node by node (:meth:`RedisStore.mirror`).

    Args:
        stores: the uppermost first; they belong to the caller, who closes them after this.
        tables: those that are served; of several equal ones one counts.
        names: of the stores, for statistics and the log; by default those of their classes.
        rules: of the stores; by default each takes all. The lowest one has all rows.
        back_off_seconds: for how long a store is left out after a fault.
        max_missed_keys: the most keys of which a store that is away is known to have missed
            updates. Where there are more, their tables are emptied there as it comes back.
        records: a store that outlives the process, as the lowest one may, in which it is kept what
            others have missed; None where none of them outlives it.

    Raises:
        ValueError: for no stores or tables, tables of one name that differ, or names that do not
            fit.
    """

    def __init__(
        self,
        stores: Sequence[RowStore],
        tables: Sequence[ServedTable],
        *,
        names: Sequence[str] | None = None,
        rules: Sequence[LevelRules] | None = None,
        back_off_seconds: float = 1.0,
        max_missed_keys: int = 1 << 20,
        records: RowStore | None = None,
    ) -> None:
        if not stores:
            raise ValueError("stores must hold at least one store, got none")
        if names is None:
            names = _names_by_class(stores)
        if len(names) != len(stores) or len(set(names)) != len(names):
            raise ValueError(
                f"names must be {len(stores)} different ones, one for each store, got {list(names)}"
            )
        if rules is None:
            rules = [LevelRules()] * len(stores)
        if len(rules) != len(stores):
            raise ValueError(f"rules must be {len(stores)}, one for each store, got {len(rules)}")
        if not back_off_seconds >= 0:
            raise ValueError(f"back_off_seconds must not be negative, got {back_off_seconds}")
        checks.check_not_negative("max_missed_keys", max_missed_keys)
        self.tables = distinct_tables(tables)
        outlives = [
            not rule.is_own and store is not stores[-1]
            for store, rule in zip(stores, rules, strict=True)
        ]
        self._levels = [
            Level(
                name,
                store,
                self.tables,
                rule,
                back_off_seconds=back_off_seconds,
                max_missed_keys=max_missed_keys,
                marks=StaleMarks(records, name) if keeps and records is not None else None,
            )
            for name, store, rule, keeps in zip(names, stores, rules, outlives, strict=True)
        ]
        for store in stores[:-1]:
            if isinstance(store, RedisStore) and not store.redis_options.is_read_only:
                store.mirror(stores[-1], records)
        self._log = UpdateLog()
        self._writer = threading.RLock()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[Fetch]:
        """Context in which rows are read that are to be written elsewhere, as into a cache; see
        :meth:`are_current`."""
        with self._log.fetching() as fetch:
            yield fetch

    def are_current(self, fetch: Fetch, table: str, keys: Tensor) -> Tensor:
        """Which of ``keys [n]`` may be written elsewhere as they were read since ``fetch`` began,
        since no update came between: bool ``[n]`` on the CPU."""
        return self._log.are_current(fetch, table, keys)

    @contextlib.contextmanager
    def updating(self, table: str, keys: Tensor) -> Iterator[None]:
        """Context in which one thread at a time updates rows, in these levels and in others."""
        with self._writer, self._log.updating(table, keys):
            yield

    def read(self, table: str, keys: Tensor) -> ReadLines:
        """Read the lines of ``keys``, from the uppermost level that has each.

        Args:
            table: name of a served table.
            keys: int64 ``[n]`` on the CPU; repeated ones are read several times.

        Raises:
            TypeError, ValueError: for another table, dtype, shape or device.
        """
        line_bytes = self._table(table).line_bytes
        with self._log.fetching() as fetch:
            lines = torch.empty(len(keys), line_bytes, dtype=torch.uint8)
            is_found = torch.zeros(len(keys), dtype=torch.bool)
            lacking: list[tuple[Level, Tensor]] = []
            is_complete = True
            for level in self._levels:
                left = (~is_found).nonzero().flatten()
                if not len(left) and len(keys):
                    break
                part = torch.empty(len(left), line_bytes, dtype=torch.uint8)
                in_level = level.read(table, keys[left], part)
                if in_level is None:
                    is_complete = False
                    continue
                lines[left[in_level]] = part[in_level]
                is_found[left[in_level]] = True
                lacking.append((level, left[~in_level]))
            for level, missed in lacking:
                if not level.rules.inserts_missed_rows:
                    continue
                chosen = missed[is_found[missed]]
                self._promote(level, fetch, table, keys[chosen], lines[chosen])
        return ReadLines(lines, is_found, is_complete)

    def write(self, table: str, keys: Tensor, rows: Tensor) -> None:
        """Write ``rows`` in all levels, in place of those that were there.

        Args:
            table: name of a served table.
            keys: int64 ``[n]``; of one that comes several times the last row counts.
            rows: floating ``[n, D]``.

        Raises:
            TypeError, ValueError: for another table, dtype or shape.
            RowStoreError, OSError: where the lowest store cannot be written; the stores above it
                are not either, and calling again does no harm.
        """
        served = self._table(table)
        checks.check_float("rows", rows)
        checks.check_shape("rows", rows, (len(keys), served.dim), "number of keys, dim")
        self.write_lines(table, keys.cpu(), served.row_format.encode(rows).cpu())

    def write_lines(self, table: str, keys: Tensor, lines: Tensor) -> None:
        """As :meth:`write`, of rows that are lines of the table's format, uint8
        ``[n, line_bytes]`` on the CPU."""
        num_rows = max(1, _WRITTEN_BYTES // self._table(table).line_bytes)
        for some_keys, some_lines in zip(keys.split(num_rows), lines.split(num_rows), strict=True):
            self._update(table, some_keys, some_lines)

    def load_lines(self, table: str, keys: Tensor, lines: Tensor, part: LoadedPart) -> None:
        """Write lines of a part of a table that is being loaded, as :meth:`write_lines` does: each
        level but the lowest takes what is within its initial share.

        Args:
            keys: int64 ``[n]`` on the CPU, each once.
        """
        num_rows, begin = max(1, _WRITTEN_BYTES // self._table(table).line_bytes), part.begin
        for some_keys, some_lines in zip(keys.split(num_rows), lines.split(num_rows), strict=True):
            with self.updating(table, some_keys):
                self._levels[-1].must_update(table, some_keys, some_lines)
                for level in reversed(self._levels[:-1]):
                    level.load(table, some_keys, some_lines, LoadedPart(begin, part.num_rows))
            begin += len(some_keys)

    def fill(self, table: str) -> None:
        """Copy rows that the lowest level has already to the levels that are this process's own,
        each its initial share.

        Raises:
            RowStoreError, OSError: where the lowest level cannot be read, or does not have the
                table and cannot be given it.
        """
        lowest = self._levels[-1].table(table)
        levels = [v for v in self._levels[:-1] if v.rules.is_own and v.rules.initial_share > 0]
        if not levels:
            return
        # Counting reads all keys, and where all rows are taken the number does not matter.
        is_whole = all(level.rules.initial_share == 1 for level in levels)
        part = LoadedPart(0, _ANY_NUMBER if is_whole else lowest.num_rows())
        with self._log.fetching() as fetch:
            for chunk in lowest.chunks(max(1, _FILLED_BYTES // lowest.line_bytes)):
                num_taken = [level.rules.num_taken(part, len(chunk.keys)) for level in levels]
                for level, num in zip(levels, num_taken, strict=True):
                    self._promote(level, fetch, table, chunk.keys[:num], chunk.lines[:num])
                if not any(num_taken):
                    break
                part = part._replace(begin=part.begin + len(chunk.keys))

    def delete(self, table: str, keys: Tensor) -> None:
        """Delete the rows of ``keys``, int64 ``[n]``, from all levels; keys without one are left
        alone.

        Raises:
            TypeError, ValueError, RowStoreError, OSError: as :meth:`write`.
        """
        self._table(table)
        self._update(table, keys.cpu(), None)

    def drop(self, table: str) -> None:
        """Have all levels let go of a table that has no rows any more, and that nothing uses until
        rows are written to it anew."""
        self._table(table)
        for level in self._levels:
            level.drop(table)

    def chunks(self, table: str, max_rows: int) -> Iterator[LineChunk]:
        """All lines of a table in the lowest level, as :meth:`RowTable.chunks` gives them.

        Raises:
            RowStoreError, OSError: where it cannot be read.
        """
        self._table(table)
        return self._levels[-1].table(table).chunks(max_rows)

    def num_rows(self, table: str) -> int:
        """The rows of a table in the lowest level.

        Raises:
            RowStoreError, OSError: where it cannot be read.
        """
        self._table(table)
        return self._levels[-1].table(table).num_rows()

    def sync(self) -> None:
        """Return when all that was written survives the end of the machine, in the lowest level."""
        self._levels[-1].sync()

    def statistics(self) -> tuple[LevelStatistics, ...]:
        """Counts of each level, the uppermost first."""
        return tuple(level.statistics() for level in self._levels)

    def _table(self, name: str) -> ServedTable:
        return self.tables[positions_of([name], self.tables)[0]]

    def _promote(self, level: Level, fetch: Fetch, table: str, keys: Tensor, lines: Tensor) -> None:
        with self._log.no_beginning:
            current = self._log.are_current(fetch, table, keys)
            level.promote(table, keys[current], lines[current])

    def _update(self, table: str, keys: Tensor, lines: Tensor | None) -> None:
        checks.check_dtype("keys", keys, (torch.int64,), "call .long()")
        checks.check_dim("keys", keys, 1)
        with self.updating(table, keys):
            self._levels[-1].must_update(table, keys, lines)
            for level in reversed(self._levels[:-1]):
                level.update(table, keys, lines)


def _names_by_class(stores: Sequence[RowStore]) -> list[str]:
    names = [type(store).__name__ for store in stores]
    return [
        name if names.count(name) == 1 else f"{name}-{place}" for place, name in enumerate(names)
    ]
