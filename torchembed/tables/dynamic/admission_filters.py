"""Filters that choose, by how often it occurs, which new ids of a dynamic table get rows.

Each filter works on the device with integers, or float64 products in a fixed order: it never waits,
can be captured in a CUDA graph, and answers the same on any device. Its keys are those of the
tables, so a table that is cut into columns admits the same ids everywhere.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchembed.core.random_bits import name_key, random_bits, shift_right
from torchembed.tables.row_index import IndexedTable

INT32_MAX = torch.iinfo(torch.int32).max
# Drawn from other keys than the initial values of rows.
_SKETCH_KEY, _DRAW_KEY = name_key(0, "admission", "sketch"), name_key(0, "admission", "draw")
_NOT_AFTER_THRESHOLD = 0.05
"""Part of the ids that still have no row when they have occurred ``threshold`` times."""


def check_count(name: str, value: object, most: int) -> None:
    """Raise unless ``value`` is an int from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be from 1 to {most}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountMinSketch:
    """Admits an id when it has occurred ``threshold`` times, by counts that may be too large.

    A sketch (Cormode and Muthukrishnan, "An improved data stream summary", 2005) has ``depth`` rows
    of ``width`` counts for each table. An id adds to one count of each row, and the least of these
    is its estimate: never below the number of its occurrences, so no id is kept out wrongly. See
    :meth:`false_admissions` for how many come in too early. The sketch takes ``4 * depth * width``
    bytes a table, however many ids there are.

    Counts only grow, up to 2**31 - 1. They do not forget ids that were admitted: one that was
    evicted comes in again at its next occurrence.
    """

    threshold: int
    """Occurrences in training batches, duplicates in a batch and the last one counted."""
    width: int
    depth: int = 4

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold, INT32_MAX)
        check_count("width", self.width, INT32_MAX)
        check_count("depth", self.depth, 64)

    def false_admissions(self, num_occurrences: int, count: int = 1) -> float:
        """The greatest probability that an id is admitted below the threshold.

        ``min(1, num_occurrences / (width * (threshold - count))) ** depth``: what other ids add to
        a count has at most the mean ``num_occurrences / width``; by Markov's inequality it reaches
        ``threshold - count`` with at most that share of it; and rows are hashed independently.

        Args:
            num_occurrences: of all other ids of the table that were counted so far.
            count: occurrences of the id itself, below the threshold.
        """
        if not 0 <= count < self.threshold:
            raise ValueError(
                f"count must be from 0 to {self.threshold - 1}, below the threshold, got {count}"
            )
        return min(1.0, num_occurrences / (self.width * (self.threshold - count))) ** self.depth

    def bytes_for(self, num_rows: int) -> int:
        """Bytes of the sketch of a table, however many rows it has."""
        return 4 * self.depth * self.width

    def build(self, tables: Sequence[IndexedTable], device: torch.device) -> "SketchFilter":
        """The filter, its counts zero, of the tables of a group."""
        return SketchFilter(self, [table.key for table in tables], device)


class Chance(enum.Enum):
    """The probability that an id without a row is given one, for its ``n`` occurrences in a batch
    and the threshold ``t``."""

    PROPORTIONAL = "proportional"
    """``min(1, n / t)``, so that more ids get rows where their occurrences come in one batch."""
    PER_OCCURRENCE = "per_occurrence"
    """``1 - (1 - q) ** n`` with ``q = 1 - 0.05 ** (1 / t)``: each occurrence is a draw of its own,
    however they are divided among batches, and 95 % of the ids that occur ``t`` times get a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probability:
    """Admits ids to a dynamic table at random, frequent ones sooner, without counts.

    Draws are a function of the seed, the table, the id and the step, the same on any number of
    ranks.
    """

    threshold: int
    """Occurrences after which most ids have a row; :class:`Chance` says how many."""
    chance: Chance = Chance.PER_OCCURRENCE

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold, INT32_MAX)
        if not isinstance(self.chance, Chance):
            raise TypeError(
                f"chance must be Chance.PROPORTIONAL or Chance.PER_OCCURRENCE, got {self.chance!r}"
            )

    def bytes_for(self, num_rows: int) -> int:
        """None: nothing is kept."""
        return 0

    def build(self, tables: Sequence[IndexedTable], device: torch.device) -> "ProbabilityFilter":
        """The filter of the tables of a group."""
        return ProbabilityFilter(self, [table.key for table in tables], device)


class ChosenIds(NamedTuple):
    """Ids of a batch that a filter has chosen."""

    is_wanted: Tensor
    """bool ``[L]``: True for positions whose ids are to be inserted; all positions of one id get
    the same answer."""
    counts: Tensor | None = None
    """int64 ``[L]``: the occurrences of each position's id so far, as the filter knows them, equal
    at all positions of a wanted id; None where it keeps no counts."""


class AdmissionFilter(Protocol):
    """Chooses, of the ids of a batch that have no row, those that get one. The index of a group
    owns it."""

    def admit(self, ids: Tensor, tables: Tensor, is_new: Tensor, epoch: Tensor) -> ChosenIds:
        """The ids to be inserted, none where ``is_new`` is False. Changes the state by the batch.

        Args:
            ids: int64 ``[L]``, any.
            tables: int32 ``[L]``, numbers within the group; -1 where there is no id.
            is_new: bool ``[L]``: True where there is an id, it has no row, and the batch is
                trained.
            epoch: int64 ``[1]``: the batch's number.
        """
        ...

    def forget(self, ids: Tensor, tables: Tensor, epoch: Tensor) -> None:
        """Note which ids got rows, so that what was counted for them may go.

        Args:
            ids: int64 ``[L]``, distinct.
            tables: int32 ``[L]``; -1 where there is no id.
            epoch: int64 ``[1]``: as for :meth:`admit`, which came before.
        """
        ...

    def contents(self, table: int) -> dict[str, Tensor]:
        """The state of a table by name: views of it, for checkpoints; empty without a state."""
        ...

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        """Copy what :meth:`contents` gave into a table."""
        ...

    def merge(
        self, table: int, contents: Mapping[str, Tensor], is_here: Callable[[Tensor], Tensor]
    ) -> None:
        """Add to a table what :meth:`contents` of another one gave, which may have held other ids.
        Waits for the device.

        Args:
            contents: of a table of any capacity, on any device.
            is_here: of ids ``[n]``, on the filter's device, which of them belong to this table.
        """
        ...


class SketchFilter:
    """The :class:`CountMinSketch` of each table of a group.

    The sketches of several ranks with equal keys can be added cell by cell, up to the largest
    int32: the sum is the sketch of all their ids. Keys belong to the state: counts that are loaded
    are those of their ids under the keys with which they were counted.

    Args:
        config: the same for all tables.
        table_keys: 64-bit keys of the tables, in order, from which those of new sketches follow.
        device: where ids come.

    Attributes:
        counts: int32 ``[T, depth, width]``, the state.
    """

    def __init__(
        self, config: CountMinSketch, table_keys: Sequence[int], device: torch.device
    ) -> None:
        self._config = config
        size = (len(table_keys), config.depth, config.width)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        keys = torch.tensor(list(table_keys), dtype=torch.int64, device=device) ^ _SKETCH_KEY
        self._row_keys = random_bits(keys[:, None], torch.arange(config.depth, device=device))
        self._first_cells = torch.arange(keys.numel() * config.depth, device=device).view(
            len(table_keys), config.depth
        )

    def add(self, ids: Tensor, tables: Tensor, is_counted: Tensor) -> Tensor:
        """Count the occurrences ``is_counted``, and estimate how often each id has occurred.

        Args:
            ids, tables: as :meth:`admit` takes them.
            is_counted: bool ``[L]``, False where there is no id.

        Returns:
            int32 ``[L]``: at least the number of occurrences of the position's id that were counted
            so far, this batch's included, as far as int32 goes; 0 where ``tables`` is -1.
        """
        table = tables.clamp_min(0).long()
        width = self._config.width
        bits = random_bits(self._row_keys[table], ids[:, None])
        columns = (shift_right(bits, 32) * width) >> 32
        cells = (self._first_cells[table] * width + columns).flatten()
        is_counted = is_counted & (tables >= 0)
        amounts = is_counted.int()[:, None].expand(-1, self._config.depth).flatten()
        counts = self.counts.view(-1).index_add_(0, cells, amounts)
        # A batch has fewer ids than int32 has numbers: a sum that is too large is negative, once.
        found = counts[cells]
        found = torch.where(found < 0, INT32_MAX, found)
        counts.scatter_reduce_(0, cells, found, "amax")
        return torch.where(tables >= 0, found.view(bits.shape).amin(1), 0)

    def admit(self, ids: Tensor, tables: Tensor, is_new: Tensor, epoch: Tensor) -> ChosenIds:
        """The ids whose estimates have reached the threshold."""
        estimates = self.add(ids, tables, is_new)
        return ChosenIds(is_new & (estimates >= self._config.threshold), estimates.long())

    def forget(self, ids: Tensor, tables: Tensor, epoch: Tensor) -> None:
        """Nothing goes: other ids share the counts."""

    def contents(self, table: int) -> dict[str, Tensor]:
        """``sketch``: int32 ``[depth, width]``; ``sketch_keys``: int64 ``[depth]``, by which ids
        are hashed to the counts of each row."""
        return {"sketch": self.counts[table], "sketch_keys": self._row_keys[table]}

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        sketch, own = contents["sketch"], self.counts[table]
        if sketch.shape != own.shape or sketch.dtype != own.dtype:
            raise ValueError(
                f"sketch must be int32 {list(own.shape)}, as depth and width of the table's "
                f"CountMinSketch say, got {sketch.dtype} {list(sketch.shape)}; build the table "
                "with those that it was saved with"
            )
        own.copy_(sketch)
        self._row_keys[table].copy_(contents["sketch_keys"])

    def merge(
        self, table: int, contents: Mapping[str, Tensor], is_here: Callable[[Tensor], Tensor]
    ) -> None:
        """Add the counts cell by cell, of all ids: none of this table's is too small then. A table
        without counts takes the keys over, too.

        Raises:
            ValueError: for counts under other keys than those of this table's.
        """
        own, keys = self.counts[table], self._row_keys[table]
        of_counts = contents["sketch_keys"].to(keys.device)
        if not own.any():
            keys.copy_(of_counts)
        elif not torch.equal(keys, of_counts):
            raise ValueError(
                "sketch_keys must be those of the counts that the table has, got others: they are "
                "of a table of another name or seed; load them into a table without counts"
            )
        total = own.long() + contents["sketch"].to(own.device, torch.int64)
        own.copy_(total.clamp_max(INT32_MAX))


class ProbabilityFilter:
    """Draws for the tables of a group, by one :class:`Probability`.

    Args:
        config: the same for all tables.
        table_keys: 64-bit keys of the tables, in order.
        device: where ids come.
    """

    def __init__(
        self, config: Probability, table_keys: Sequence[int], device: torch.device
    ) -> None:
        self._config = config
        self._keys = torch.tensor(list(table_keys), dtype=torch.int64, device=device) ^ _DRAW_KEY
        # (1 - q) ** n as a product of four powers, one for each byte of n: multiplications of
        # float64 give the same bits on every device, where its pow() need not.
        exponents = [[digit << 8 * place for digit in range(256)] for place in range(4)]
        powers = [
            [_NOT_AFTER_THRESHOLD ** (exponent / config.threshold) for exponent in row]
            for row in exponents
        ]
        self._powers = torch.tensor(powers, dtype=torch.float64, device=device)

    def admit(self, ids: Tensor, tables: Tensor, is_new: Tensor, epoch: Tensor) -> ChosenIds:
        """The ids that are drawn: one draw for each distinct one, by its occurrences."""
        count = num_occurrences(ids, tables, is_new)
        bits = random_bits(random_bits(self._keys, epoch)[tables.clamp_min(0).long()], ids)
        if self._config.chance is Chance.PROPORTIONAL:
            return ChosenIds(is_new & (shift_right(bits, 1) % self._config.threshold < count))
        powers = (self._powers[place][(count >> 8 * place) & 0xFF] for place in range(4))
        first, second, third, fourth = powers
        probability_of_none = first * second * third * fourth
        drawn = shift_right(bits, 11).double() * 2.0**-53
        return ChosenIds(is_new & (drawn >= probability_of_none))

    def forget(self, ids: Tensor, tables: Tensor, epoch: Tensor) -> None:
        """Nothing is kept."""

    def contents(self, table: int) -> dict[str, Tensor]:
        """Nothing: there is no state."""
        return {}

    def load_contents(self, table: int, contents: Mapping[str, Tensor]) -> None:
        """Nothing is kept."""

    def merge(
        self, table: int, contents: Mapping[str, Tensor], is_here: Callable[[Tensor], Tensor]
    ) -> None:
        """Nothing is kept."""


def num_occurrences(ids: Tensor, tables: Tensor, is_counted: Tensor) -> Tensor:
    """The times that each position's id of its table stands at the positions ``is_counted``.

    Args:
        ids: int64 ``[L]``, any.
        tables: int32 ``[L]``.
        is_counted: bool ``[L]``.

    Returns:
        int64 ``[L]``: at least 1 where ``is_counted``, and 0 elsewhere.
    """
    tables = torch.where(is_counted, tables, -1)
    order = ids.argsort(stable=True)
    order = order[tables[order].argsort(stable=True)]
    ids, tables = ids[order], tables[order]
    starts_run = torch.zeros_like(is_counted)
    starts_run[1:] = (ids[1:] != ids[:-1]) | (tables[1:] != tables[:-1])
    run = starts_run.cumsum(0)
    counts = torch.zeros_like(ids).index_add_(0, run, is_counted[order].long())
    return torch.zeros_like(ids).scatter_(0, order, counts[run])
