"""Policies of dynamic tables: what a table keeps in bounded memory where ids come and go."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from torchembed.ops.hash_table import Policy
from torchembed.tables.dynamic.admission_filters import CountMinSketch, Probability
from torchembed.tables.dynamic.hashed_rows import HashedRows
from torchembed.tables.dynamic.minimum_count import MinimumCount
from torchembed.tables.missing_rows import Missing, MissingValue, as_missing


def check_at_least(name: str, value: object, least: int) -> None:
    """Raise unless ``value`` is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


MAX_ROWS = 2**40
"""The most rows of a dynamic table, and ids of its log: far more than memory holds, and few enough
that sizes in bytes are int64."""


def check_at_most(name: str, value: int, most: int) -> None:
    """Raise unless ``value`` is at most ``most``."""
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRU:
    """Evicts the row that training batches have not used for the longest time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LFU:
    """Evicts the row whose id has occurred least often in training batches since it was inserted.

    Each occurrence counts, also several in one batch. Among rows of equal counts the one that was
    unused for longest goes. A new id gets a row only if it has occurred at least as often as the
    least frequent id in its place: in its batch or, if an admission policy counts ids without a
    row, since it was first counted.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayingLFU:
    """Evicts as :class:`LFU` does, by counts that decay.

    Once in ``steps_per_decay`` training steps each count is multiplied by ``rate`` and rounded
    down. Blocks of up to 4096 rows take turns, so that each step decays some of them.
    """

    rate: float
    """The factor, at least 0 and less than 1."""
    steps_per_decay: int
    """The number of training steps between two decays of a count, at least 1."""

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float):
            raise TypeError(f"rate must be a float, got {self.rate!r}")
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate must be in [0, 1), got {self.rate}; LFU() keeps whole counts")
        check_at_least("steps_per_decay", self.steps_per_decay, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochLFU:
    """Evicts rows of older epochs first, and within an epoch the least frequent ids.

    Every ``steps_per_epoch`` training batches are an epoch. A row belongs to the epoch of its last
    use, and counts the occurrences of its id since it was inserted, up to 2**32 - 1.
    """

    steps_per_epoch: int
    """The number of training batches in an epoch, at least 1."""

    def __post_init__(self) -> None:
        check_at_least("steps_per_epoch", self.steps_per_epoch, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallerScores:
    """Evicts the row with the least of the scores that the caller gives to ids.

    ``set_score`` of a module gives a score to all ids that training batches use from then on;
    without it ids keep their scores. ``assign_scores`` gives scores to the ids that it names. Among
    rows of equal scores the one that was unused for longest goes. A new id gets no row if its score
    is less than those of all rows in its place.
    """

    initial_score: int = 0
    """The score of new ids while ``set_score`` gives none; an int64."""

    def __post_init__(self) -> None:
        check_score("initial_score", self.initial_score)


def check_score(name: str, score: object) -> None:
    """Raise unless ``score``, ``name`` in errors, is an int that fits into an int64."""
    if isinstance(score, bool) or not isinstance(score, int):
        raise TypeError(f"{name} must be an int, got {score!r}")
    if not -(2**63) <= score < 2**63:
        raise ValueError(f"{name} must be in [-2**63, 2**63), got {score}")


Eviction = LRU | LFU | DecayingLFU | EpochLFU | CallerScores
AdmissionPolicy = MinimumCount | CountMinSketch | Probability

_POLICIES = {
    LRU: Policy.LRU,
    LFU: Policy.LFU,
    DecayingLFU: Policy.LFU,
    EpochLFU: Policy.EPOCH_LFU,
    CallerScores: Policy.CALLER,
}


def policy_of(eviction: Eviction) -> Policy:
    """The scores by which hash tables choose whose row goes under ``eviction``."""
    return _POLICIES[type(eviction)]


_NUMBERS = {LRU: 0, LFU: 1, DecayingLFU: 2, EpochLFU: 3, CallerScores: 4}
"""Numbers of the policies in state dicts, which stay as they are."""


def score_numbers(eviction: Eviction) -> list[int]:
    """The numbers that two tables must share for the scores of one to mean the same in the other:
    the policy's number, and the steps of an epoch, 0 where scores hold none."""
    steps = eviction.steps_per_epoch if isinstance(eviction, EpochLFU) else 0
    return [_NUMBERS[type(eviction)], steps]


def policy_named(numbers: Sequence[int]) -> str:
    """The policy of which :func:`score_numbers` gave ``numbers``, in words for errors."""
    number, steps = numbers
    names = {of_kind: kind.__name__ for kind, of_kind in _NUMBERS.items()}
    if number not in names:
        return f"policy number {number}, which this version does not know"
    return f"{names[number]}(steps_per_epoch={steps})" if steps else names[number]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Makes a table dynamic: any 64-bit integer is an id, and gets a row when training meets it.

    ``num_embeddings`` of the table is its capacity. A row's initial values are a function of the
    seed, the table and the id. If a new id finds no free row, ``eviction`` chooses the id that
    loses its row; rows that a batch under way or the batch before it uses are never taken. An id
    without a row is looked up as ``missing`` says. Evaluation (a module in evaluation mode,
    ``torch.no_grad()``, or a frozen weight) inserts nothing and counts no use.

    Args:
        initial_capacity: the least number of rows at first; at least one block of up to 4096. The
            table doubles its rows between steps, up to its capacity, as ids need them. None makes
            all rows at the start.
        eviction: chooses the rows that make room: :class:`LRU`, :class:`LFU`,
            :class:`DecayingLFU`, :class:`EpochLFU` or :class:`CallerScores`.
        admission: chooses the new ids that get rows: :class:`MinimumCount`,
            :class:`CountMinSketch` or :class:`Probability`. None admits all.
        ttl_steps: evicts ids that this number of training steps in a row has not used; at least 2,
            since rows of the step before are in use. None evicts none by age.
        ttl_seconds: evicts ids that training has not used for so long by ``clock``. The time of
            rows from a checkpoint begins with the load.
        clock: gives the time in seconds, which must not run backwards. The host calls it between
            steps.
        max_rows: a bound, at most the capacity. While the table holds more ids, those with the
            least scores by ``eviction`` are evicted, except rows in use.
        max_bytes: the same bound in bytes of rows, of their optimizer state once there is a fused
            optimizer, and of what finds ids. Of two bounds the one that allows fewer rows counts.
        evict_to: the share of the bound down to which ids are evicted; more than 0, at most 1.
        sweep_steps: the most steps that one pass over the table takes to evict ids that are too old
            or too many. Each step visits one part in ``sweep_steps`` of the rows, and at least one
            block of up to 4096.
        deletion_log: ids that left the table which are remembered for deltas, of 32 bytes each on
            the device; tables that are looked up together share the memory. 0: none, and
            ``delta`` is refused.
        missing: what an id without a row is looked up as: ``"zeros"``; ``"initial"``, the initial
            values of the row that it would get; or a vector of ``embedding_dim`` numbers, as a
            sequence or a floating tensor, which is rounded to the table's dtype. Such values are
            never trained and never stored. Or :class:`HashedRows`, rows that such ids share and
            train.
    """

    initial_capacity: int | None = None
    eviction: Eviction = LRU()
    admission: AdmissionPolicy | None = None
    ttl_steps: int | None = None
    ttl_seconds: float | None = None
    clock: Callable[[], float] = dataclasses.field(default=time.monotonic, repr=False)
    max_rows: int | None = None
    max_bytes: int | None = None
    evict_to: float = 0.9
    sweep_steps: int = 1000
    deletion_log: int = 0
    missing: Missing | str | Sequence[float] | Tensor | HashedRows = Missing.ZEROS

    def __post_init__(self) -> None:
        if not isinstance(self.eviction, Eviction):
            raise TypeError(
                "eviction must be LRU(), LFU(), DecayingLFU(rate=..., steps_per_decay=...), "
                f"EpochLFU(steps_per_epoch=...) or CallerScores(), got {self.eviction!r}"
            )
        if self.admission is not None and not isinstance(self.admission, AdmissionPolicy):
            raise TypeError(
                "admission must be MinimumCount(...), CountMinSketch(...), Probability(...) or "
                f"None, got {self.admission!r}"
            )
        if self.initial_capacity is not None:
            check_at_least("initial_capacity", self.initial_capacity, 1)
        if self.ttl_steps is not None:
            check_at_least("ttl_steps", self.ttl_steps, 2)
        if self.ttl_seconds is not None:
            seconds = self.ttl_seconds
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise TypeError(f"ttl_seconds must be a float, got {seconds!r}")
            if not 0 < seconds < math.inf:
                raise ValueError(f"ttl_seconds must be positive and finite, got {seconds}")
        if not callable(self.clock):
            raise TypeError(f"clock must be a function without arguments, got {self.clock!r}")
        if self.max_rows is not None:
            check_at_least("max_rows", self.max_rows, 1)
        if self.max_bytes is not None:
            check_at_least("max_bytes", self.max_bytes, 1)
        if isinstance(self.evict_to, bool) or not isinstance(self.evict_to, int | float):
            raise TypeError(f"evict_to must be a float, a part of the bound, got {self.evict_to!r}")
        if not 0 < self.evict_to <= 1:
            raise ValueError(
                f"evict_to must be in (0, 1], a part of the bound, got {self.evict_to}"
            )
        check_at_least("sweep_steps", self.sweep_steps, 1)
        check_at_least("deletion_log", self.deletion_log, 0)
        check_at_most("deletion_log", self.deletion_log, MAX_ROWS)
        self._check_uses()
        if not isinstance(self.missing, HashedRows):
            object.__setattr__(self, "missing", as_missing(self.missing))

    def _check_uses(self) -> None:
        """Raise for a setting that nothing would read."""
        ages, bounds = ("ttl_steps", "ttl_seconds"), ("max_rows", "max_bytes")
        readers = {"clock": ("ttl_seconds",), "evict_to": bounds, "sweep_steps": (*ages, *bounds)}
        for field in dataclasses.fields(self):
            of_field, value = readers.get(field.name, ()), getattr(self, field.name)
            if of_field and value != field.default and not any(getattr(self, n) for n in of_field):
                raise ValueError(
                    f"{field.name} must be left out without {' or '.join(of_field)}, got "
                    f"{value!r}, which nothing would read; give one of them too"
                )

    @property
    def num_hashed_rows(self) -> int:
        """Rows beside the capacity, which ids without one of their own share."""
        return self.missing.num_rows if isinstance(self.missing, HashedRows) else 0

    @property
    def missing_value(self) -> MissingValue:
        """The values of ids that read no row at all."""
        return Missing.ZEROS if isinstance(self.missing, HashedRows) else as_missing(self.missing)


def index_bytes_of(dynamic: Dynamic) -> int:
    """The bytes that an index keeps of one row: its id, a digest of it, the epoch of its last use
    and, but under LRU, its score."""
    return 8 + 1 + 8 + (0 if policy_of(dynamic.eviction) is Policy.LRU else 8)
