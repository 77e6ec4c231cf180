"""Search for an assignment of tables to ranks: greedy for given options, then local search.

The search is deterministic: the same options give the same assignment on every rank.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.growth import MovedPart, growth_bytes
from torchembed.sharding.planning.loads import Everywhere, Load
from torchembed.sharding.planning.options import Option
from torchembed.sharding.planning.plan import Placement

MAX_PLACEMENTS = 60_000
"""Budget of all descents: tables placed, counted over all assignments tried. It takes one core a
second or two; three times as many gain at most 3 %."""
MAX_TRIES = 2000
"""Most changes of single parts that a descent then tries."""
NUM_STARTS = 3
"""Number of descents, from different assignments."""
NUM_PART_SIZES = 24
"""Limits on the largest part that greedy starts are made for."""
NUM_PAIRED = 4
"""Number of heaviest tables whose options are also changed two at a time."""
NUM_PARTNERS = 8
"""Number of least loaded ranks that shards of the slowest rank may be exchanged with."""
LEAST_GAIN = 1e-6
"""Relative gain below which a difference is taken for rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """An option for every table, and the ranks of its parts."""

    picks: tuple[int, ...]
    ranks: tuple[np.ndarray, ...]
    loads: np.ndarray
    """``[W, len(Load) + groups of tables]``: each rank's loads, then its number of parts of each
    group."""
    held_bytes: np.ndarray
    """Bytes that each rank holds at its fullest, ``[W]``."""
    everywhere: Everywhere
    seconds: np.ndarray
    """Predicted time of each rank, ``[W]``."""
    missing_bytes: float
    """Bytes beyond the ranks' memory, summed over ranks, and beyond those of hosts and disks, over
    nodes."""

    @property
    def imbalance(self) -> float:
        """The slowest rank's time over the mean."""
        mean = float(self.seconds.mean())
        return float(self.seconds.max()) / mean if mean > 0 else 1.0

    def is_better_than(self, other: "Assignment", max_imbalance: float) -> bool:
        """True if this assignment comes first by missing memory, then by imbalance beyond
        ``max_imbalance``, then by the slowest rank's time, then by the sum of squares of all."""
        for mine, its in (
            (self.missing_bytes, other.missing_bytes),
            (max(self.imbalance - max_imbalance, 0), max(other.imbalance - max_imbalance, 0)),
            (self.seconds.max(), other.seconds.max()),
            (np.square(self.seconds).sum(), np.square(other.seconds).sum()),
        ):
            if abs(mine - its) > LEAST_GAIN * max(mine, its):
                return bool(mine < its)
        return False


class Search:
    """A search over ``options[t]`` of each table t."""

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]]) -> None:
        self._model = model
        known = dict.fromkeys(option.table_group for of_table in options for option in of_table)
        known.pop(None, None)
        numbers = {group: number for number, group in enumerate(known)}
        self._options = [[_counting(option, numbers) for option in of] for of in options]
        self._num_columns = len(Load) + len(numbers)
        self._num_ranks = model.topology.num_ranks
        by_node = np.arange(self._num_ranks).reshape(model.topology.num_nodes, -1)
        self._turns = by_node.T.ravel()
        """Ranks in the order in which equally busy ones get parts: of one node after another, whose
        links its ranks share."""
        topology = model.topology
        self._memory = topology.memory_bytes
        limits = {Load.HOST: topology.host.memory_bytes}
        if topology.disk.capacity_bytes is not None:
            limits[Load.DISK] = topology.disk.capacity_bytes
        self._node_limits = {
            load: limit
            for load, limit in limits.items()
            if any(option.loads[:, load].any() for of_table in options for option in of_table)
        }
        """Bytes of each node that options take some of."""
        self._may_grow = any(option.moved for of_table in options for option in of_table)
        self._max_imbalance = math.inf
        self._placements_left = 0

    def best(self, max_imbalance: float = math.inf) -> Assignment:
        """The fastest assignment found whose imbalance is allowed, or the nearest one where there
        is none. It may lack memory, where none was found that does not."""
        fastest = self._best_within(math.inf)
        if fastest.imbalance <= max_imbalance:
            return fastest
        balanced = self._best_within(max_imbalance)
        return balanced if self._is_better(balanced, fastest) else fastest

    def _is_better(self, one: Assignment, other: Assignment) -> bool:
        return one.is_better_than(other, self._max_imbalance)

    def _best_within(self, max_imbalance: float) -> Assignment:
        self._max_imbalance, self._placements_left = max_imbalance, MAX_PLACEMENTS
        starts: list[Assignment] = []
        known = set()
        for picks in self._start_picks():
            if picks not in known:
                known.add(picks)
                starts.append(self._greedy(picks))
        best = None
        for _ in range(min(NUM_STARTS, len(starts))):
            start = starts[0]
            for other in starts[1:]:
                if self._is_better(other, start):
                    start = other
            starts.remove(start)
            found = self._improved_ranks(self._improved_picks(start))
            if best is None or self._is_better(found, best):
                best = found
        assert best is not None
        return best

    def _start_picks(self) -> Iterator[tuple[int, ...]]:
        """Each table's option of the least total cost, for falling limits on its largest part.

        Options whose parts fit into memory come before those whose parts do not.
        """
        sums, largest, is_too_big = [], [], []
        for of_table in self._options:
            sums.append([self._mean_seconds(option) for option in of_table])
            largest.append([option.most_seconds for option in of_table])
            held = [option.everywhere.held_bytes + option.most_held_bytes for option in of_table]
            is_too_big.append([num_bytes > self._memory for num_bytes in held])
        most = max((value for of_table in largest for value in of_table), default=0.0)
        for step in range(NUM_PART_SIZES):
            limit = most * 2.0 ** (-step / 2)
            picks = []
            for of_table, large, big in zip(sums, largest, is_too_big, strict=True):
                keys = [
                    (is_big, max(size, limit), total)
                    for is_big, size, total in zip(big, large, of_table, strict=True)
                ]
                picks.append(keys.index(min(keys)))
            yield tuple(picks)

    def _mean_seconds(self, option: Option) -> float:
        """Seconds that ``option`` would cost each rank if its parts were spread evenly."""
        everywhere, model = option.everywhere, self._model
        memory = model.lookup_seconds(everywhere.lookup_bytes)
        memory += model.update_seconds(everywhere.update_bytes)
        reduce = model.all_reduce_seconds(everywhere.all_reduce_bytes)
        return option.holder_seconds.sum() / self._num_ranks + memory + reduce

    def _greedy(self, picks: Sequence[int]) -> Assignment:
        """An assignment of the options ``picks``: largest parts first, each to the least loaded
        rank."""
        chosen = [options[pick] for options, pick in zip(self._options, picks, strict=True)]
        self._placements_left -= len(chosen)
        everywhere = Everywhere()
        for option in chosen:
            everywhere = everywhere.plus(option.everywhere)
        loads = np.zeros((self._num_ranks, self._num_columns))
        busy = np.zeros(self._num_ranks)
        ranks: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(chosen)
        order = sorted(
            range(len(chosen)),
            key=lambda t: (len(chosen[t].groups) != 1, -chosen[t].most_seconds),
        )
        for number in order:
            option = chosen[number]
            members = self._least_loaded(option, loads, busy, everywhere.held_bytes)
            ranks[number] = members
            if option.placement in (Placement.DATA_PARALLEL, Placement.ROW_WISE) and (
                option.num_parts == self._num_ranks and option.exact is None
            ):
                members = slice(None)  # all in order: indexing each would cost more than the rest
            loads[members] += option.loads
            busy[members] += option.holder_seconds
        return self._assignment(tuple(picks), tuple(ranks), loads, everywhere)

    def _least_loaded(
        self, option: Option, loads: np.ndarray, busy: np.ndarray, held_everywhere: float
    ) -> np.ndarray:
        if len(option.groups) == 1:
            return option.groups[0]
        lacking = self._lacking(option, loads, held_everywhere)
        if option.groups:
            most_busy = busy[option.stacked_groups].max(axis=1)
            if lacking is None:
                return option.groups[most_busy.argmin()]
            most_lacking = lacking[option.stacked_groups].max(axis=1)
            return option.groups[np.lexsort((most_busy, most_lacking))[0]]
        pool = self._turns
        if len(option.pool) < self._num_ranks:
            pool = pool[np.isin(pool, option.pool)]
        if lacking is not None:
            order = np.lexsort((busy[pool], lacking[pool]))
        else:
            order = np.argsort(busy[pool], kind="stable")
        return np.sort(pool[order[: option.num_parts]])

    def _lacking(
        self, option: Option, loads: np.ndarray, held_everywhere: float
    ) -> np.ndarray | None:
        """Bytes that each rank, and its node, would lack with the largest part of ``option``,
        ``[W]``; None where none would lack any."""
        held = loads[:, Load.HELD]
        if not self._node_limits:
            most = held.max() + held_everywhere + option.most_held_bytes
            if most <= self._memory:  # as nearly always: one pass over the ranks is enough
                return None
        lacking = np.maximum(held + held_everywhere + option.most_held_bytes - self._memory, 0.0)
        for load, limit in self._node_limits.items():
            of_nodes = self._of_nodes(loads[:, load]) + option.loads[:, load].max()
            of_node = np.maximum(of_nodes - limit, 0.0)
            lacking += np.repeat(of_node, self._model.topology.ranks_per_node)
        return lacking if lacking.any() else None

    def _assignment(
        self,
        picks: tuple[int, ...],
        ranks: tuple[np.ndarray, ...],
        loads: np.ndarray,
        everywhere: Everywhere,
    ) -> Assignment:
        held = loads[:, Load.HELD] + everywhere.held_bytes
        if self._may_grow:
            held += self._growth_bytes(picks, ranks)
        missing = float(np.maximum(held - self._memory, 0.0).sum())
        for load, limit in self._node_limits.items():
            of_nodes = self._of_nodes(loads[:, load])
            missing += float(np.maximum(of_nodes - limit, 0.0).sum())
        num_groups = np.count_nonzero(loads[:, len(Load) :], axis=1)
        num_groups += everywhere.all_reduce_bytes > 0
        return Assignment(
            picks=picks,
            ranks=ranks,
            loads=loads,
            held_bytes=held,
            everywhere=everywhere,
            seconds=self._model.rank_seconds(loads, everywhere, num_groups),
            missing_bytes=missing,
        )

    def _of_nodes(self, of_ranks: np.ndarray) -> np.ndarray:
        """Sums of ``of_ranks [W]`` over the ranks of each node, ``[nodes]``."""
        return of_ranks.reshape(self._model.topology.num_nodes, -1).sum(axis=1)

    def _growth_bytes(self, picks: tuple[int, ...], ranks: tuple[np.ndarray, ...]) -> list[int]:
        """The most bytes that growth takes on each rank."""
        moved: list[list[MovedPart]] = [[] for _ in range(self._num_ranks)]
        for options, pick, members in zip(self._options, picks, ranks, strict=True):
            # Parts without rows come last.
            for part, rank in zip(options[pick].moved, members.tolist(), strict=False):
                moved[rank].append(part)
        return [growth_bytes(parts) for parts in moved]

    def _improved_picks(self, best: Assignment) -> Assignment:
        """``best`` with other options of one table at a time, then of two of the heaviest, while
        that helps."""
        while self._placements_left > 0:
            start, by_weight = best, self._by_weight(best)
            for number in by_weight:
                best = self._best_of(best, (number,))
            if best is start:
                for pair in itertools.combinations(by_weight[:NUM_PAIRED], 2):
                    best = self._best_of(best, pair)
            if best is start:
                break
        return best

    def _best_of(self, best: Assignment, numbers: tuple[int, ...]) -> Assignment:
        """``best``, or a better one in which the tables ``numbers`` have other options."""
        here = best
        for choice in itertools.product(*(range(len(self._options[n])) for n in numbers)):
            if self._placements_left <= 0:
                break
            if all(here.picks[n] != pick for n, pick in zip(numbers, choice, strict=True)):
                picks = list(here.picks)
                for number, pick in zip(numbers, choice, strict=True):
                    picks[number] = pick
                found = self._greedy(picks)
                if self._is_better(found, best):
                    best = found
        return best

    def _by_weight(self, assignment: Assignment) -> list[int]:
        """Tables by falling cost on the critical rank."""
        slowest = self._critical(assignment)
        weights = []
        for options, pick, ranks in zip(
            self._options, assignment.picks, assignment.ranks, strict=True
        ):
            option = options[pick]
            held = option.holder_seconds[ranks == slowest].sum()
            weights.append(held + self._mean_seconds(option))
        return sorted(range(len(weights)), key=lambda number: -weights[number])

    def _critical(self, assignment: Assignment) -> int:
        """The fullest rank where memory is missing, of its device or else of the fullest host, or
        disk; else the slowest."""
        if assignment.missing_bytes > 0:
            if (assignment.held_bytes > self._memory).any():
                return int(assignment.held_bytes.argmax())
            for load, limit in self._node_limits.items():
                of_ranks = assignment.loads[:, load]
                of_nodes = np.repeat(self._of_nodes(of_ranks), self._model.topology.ranks_per_node)
                if of_nodes.max() > limit:
                    return int(np.lexsort((of_ranks, of_nodes))[-1])
        return int(assignment.seconds.argmax())

    def _improved_ranks(self, best: Assignment) -> Assignment:
        """``best`` with parts of the critical rank given to others, or exchanged for theirs, while
        that helps."""
        tries_left, is_improving = MAX_TRIES, True
        while is_improving:
            is_improving = False
            for found in itertools.islice(self._neighbours(best), tries_left):
                tries_left -= 1
                if self._is_better(found, best):
                    best, is_improving = found, True
                    break
        return best

    def _neighbours(self, assignment: Assignment) -> Iterator[Assignment]:
        source = self._critical(assignment)
        partners = np.argsort(assignment.seconds, kind="stable")[:NUM_PARTNERS].tolist()
        movable: dict[int, list[tuple[int, int]]] = {}
        for number, ranks in enumerate(assignment.ranks):
            if self._options[number][assignment.picks[number]].pool.size:
                for part, rank in enumerate(ranks.tolist()):
                    if rank == source or rank in partners:
                        movable.setdefault(rank, []).append((number, part))
        for partner in partners:
            if partner == source:
                continue
            for mine in movable.get(source, []):
                for its in (None, *movable.get(partner, [])):
                    exchanged = self._exchanged(assignment, mine, source, its, partner)
                    if exchanged is not None:
                        yield exchanged

    def _exchanged(
        self,
        assignment: Assignment,
        mine: tuple[int, int],
        source: int,
        its: tuple[int, int] | None,
        partner: int,
    ) -> Assignment | None:
        """The assignment with ``mine`` (table, part) given from rank ``source`` to ``partner``, and
        ``its`` back; None where a table would have two parts on a rank, or be on a rank that is not
        allowed."""
        ranks = list(assignment.ranks)
        loads = assignment.loads.copy()
        for part, new in ((mine, partner), (its, source)):
            if part is None:
                continue
            number, index = part
            option = self._options[number][assignment.picks[number]]
            if new in ranks[number] or new not in option.pool:
                return None
            # A table's ranks stay in increasing order, so that all its parts may change ranks:
            # their loads are taken off and added anew.
            loads[ranks[number]] -= option.loads
            members = ranks[number].copy()
            members[index] = new
            members.sort()
            loads[members] += option.loads
            ranks[number] = members
        return self._assignment(assignment.picks, tuple(ranks), loads, assignment.everywhere)


def _counting(option: Option, numbers: Mapping[Hashable, int]) -> Option:
    """``option`` with another column of loads for each group of tables: 1 for its own."""
    counts = np.zeros((option.num_parts, len(numbers)))
    if option.table_group is not None:
        counts[option.loads.any(axis=1), numbers[option.table_group]] = 1
    return dataclasses.replace(option, loads=np.hstack([option.loads, counts]))
