"""Admission filters: which new ids get rows, and with what probability."""

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torchembed.core.random_bits import name_key
from torchembed.tables.dynamic.admission_filters import (
    AdmissionFilter,
    Chance,
    CountMinSketch,
    Probability,
    num_occurrences,
)
from torchembed.tables.dynamic.minimum_count import MinimumCount
from torchembed.tables.row_index import IndexedTable

CPU = torch.device("cpu")
TABLES = [IndexedTable(name_key(0, name), 0, 8, 0) for name in "ab"]
INT64 = torch.iinfo(torch.int64)
EDGES = [0, -1, 1, INT64.min, INT64.max, 2**32, -(2**32)]
IDS = st.one_of(st.sampled_from(EDGES), st.integers(INT64.min, INT64.max), st.integers(0, 9))
OCCURRENCES = st.lists(st.tuples(IDS, st.integers(-1, 1), st.booleans()), max_size=40)
FILTERS = {
    "minimum count": MinimumCount(2, capacity=4000),
    "sketch": CountMinSketch(threshold=2, width=64),
    "proportional": Probability(threshold=3, chance=Chance.PROPORTIONAL),
    "per occurrence": Probability(threshold=3, chance=Chance.PER_OCCURRENCE),
}


def columns(
    occurrences: list[tuple[int, int, bool]], device: torch.device = CPU
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, tables, and which positions count."""
    ids, tables, is_counted = zip(*occurrences, strict=True) if occurrences else ([], [], [])
    return (
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device),
        torch.tensor(is_counted, dtype=torch.bool, device=device),
    )


def epoch(number: int, device: torch.device = CPU) -> Tensor:
    return torch.tensor([number], device=device)


def admitted(
    admission: AdmissionFilter, ids: list[int], *, at: int = 1, table: int = 0
) -> list[bool]:
    """The answers for a batch of new ``ids`` of one table."""
    rows = columns([(id_, table, True) for id_ in ids])
    return admission.admit(*rows, epoch(at)).is_wanted.tolist()


@given(batches=st.lists(OCCURRENCES, max_size=4))
def test_occurrences_are_counted_by_table_and_id(
    batches: list[list[tuple[int, int, bool]]],
) -> None:
    for batch in batches:
        ids, tables, is_counted = columns(batch)
        is_counted &= tables >= 0
        expected = Counter((id_, table) for id_, table, counts in batch if counts and table >= 0)
        found = num_occurrences(ids, tables, is_counted).tolist()
        for (id_, table, _), counts, number in zip(batch, is_counted.tolist(), found, strict=True):
            assert number == (expected[id_, table] if counts else 0)


@given(
    batches=st.lists(OCCURRENCES, min_size=1, max_size=6),
    width=st.integers(1, 50),
    depth=st.integers(1, 5),
)
def test_estimates_are_never_below_the_count(
    batches: list[list[tuple[int, int, bool]]], width: int, depth: int
) -> None:
    """Nor above the count of all ids of the table; one id alone is counted exactly."""
    sketch = CountMinSketch(threshold=1, width=width, depth=depth).build(TABLES, CPU)
    counts: Counter[tuple[int, int]] = Counter()
    totals: Counter[int] = Counter()
    for batch in batches:
        for id_, table, is_counted in batch:
            counts[id_, table] += is_counted
            totals[table] += is_counted
        found = sketch.add(*columns(batch)).tolist()
        for (id_, table, _), estimate in zip(batch, found, strict=True):
            if table < 0:
                assert estimate == 0
            else:
                assert counts[id_, table] <= estimate <= totals[table]
    for table in range(2):
        assert sketch.counts[table].sum(1).tolist() == [totals[table]] * depth


def test_wide_sketches_are_exact(device: torch.device) -> None:
    sketch = CountMinSketch(threshold=2, width=1 << 16).build(TABLES, device)
    batch = [(id_, table, True) for id_, table in product(EDGES, range(2))]
    other = [*batch[:3], batch[0], (5, 0, False), (6, -1, True)]
    assert sketch.add(*columns(batch, device)).tolist() == [1] * len(batch)
    assert sketch.add(*columns(other, device)).tolist() == [3, 2, 2, 3, 0, 0]


def test_false_admissions_stay_below_the_bound() -> None:
    """Each id occurs once; those that come behind the last batch see all others."""
    config = CountMinSketch(threshold=4, width=2048, depth=3)
    sketch = config.build(TABLES[:1], CPU)
    num_ids, num_others = 20_000, 4096
    others = torch.arange(num_others) * 977
    sketch.add(others, torch.zeros(num_others, dtype=torch.int32), torch.ones(num_others).bool())
    ids = -1 - torch.arange(num_ids)
    nothing = torch.zeros(num_ids, dtype=torch.bool)
    estimates = sketch.add(ids, torch.zeros(num_ids, dtype=torch.int32), nothing)
    for count in range(config.threshold):
        bound = config.false_admissions(num_others, count)
        share = (estimates >= config.threshold - count).double().mean().item()
        assert share <= bound + 3 * math.sqrt(bound * (1 - bound) / num_ids)
    assert config.false_admissions(num_others, 2) == 1.0
    assert config.false_admissions(1024, 0) == (1024 / (2048 * 4)) ** 3


def test_ids_are_admitted_when_they_reach_the_threshold() -> None:
    sketch = CountMinSketch(threshold=3, width=1 << 16).build(TABLES, CPU)
    assert admitted(sketch, [7, 7, 8]) == [False] * 3
    assert admitted(sketch, [7, 8, 9, 9, 9]) == [True, False, True, True, True]
    assert admitted(sketch, [7, 8], table=1) == [False] * 2
    assert admitted(sketch, [8]) == [True]


def test_counts_stay_at_the_largest_integer() -> None:
    sketch = CountMinSketch(threshold=5, width=8).build(TABLES, CPU)
    sketch.counts.fill_(2**31 - 3)
    for _ in range(3):
        assert admitted(sketch, [1, 1, 1, 2]) == [True] * 4
    assert int(sketch.counts.min()) == 2**31 - 3
    assert int(sketch.counts.max()) == 2**31 - 1
    estimates = sketch.add(*columns([(1, 0, False), (2, 0, False)]))
    assert estimates.tolist() == [2**31 - 1, 2**31 - 1]


def test_sketches_of_several_ranks_add_up() -> None:
    config = CountMinSketch(threshold=3, width=32, depth=2)
    batches = [[(id_ * step, 0, True) for id_ in range(20)] for step in range(1, 5)]
    ranks = [config.build(TABLES[:1], CPU) for _ in range(2)]
    whole = config.build(TABLES[:1], CPU)
    for batch in batches:
        whole.add(*columns(batch))
        for rank in range(2):
            ranks[rank].add(*columns([row for row in batch if row[0] % 2 == rank]))
    assert torch.equal(ranks[0].counts + ranks[1].counts, whole.counts)


def test_a_sketch_goes_on_from_its_contents() -> None:
    config = CountMinSketch(threshold=3, width=100)
    first, second = (config.build(tables, CPU) for tables in (TABLES, TABLES[::-1]))
    admitted(first, [1, 1, 2], table=1)
    saved = {name: tensor.clone() for name, tensor in first.contents(1).items()}
    second.load_contents(0, saved)
    assert admitted(second, [1, 2]) == admitted(first, [1, 2], table=1) == [True, False]
    other = CountMinSketch(threshold=3, width=101).build(TABLES, CPU)
    with pytest.raises(ValueError, match=r"sketch must be int32 \[4, 101\], as .* got .*\[4, 100"):
        other.load_contents(0, saved)
    of_others = {**saved, "sketch_keys": saved["sketch_keys"] + 1}
    with pytest.raises(ValueError, match="sketch_keys must be those of the counts that the table"):
        first.merge(1, of_others, torch.ones_like)
    drawn = Probability(threshold=3).build(TABLES, CPU)
    drawn.load_contents(0, drawn.contents(1))
    assert drawn.contents(0) == {}


@given(
    batches=st.lists(st.tuples(OCCURRENCES, st.booleans()), max_size=8),
    threshold=st.integers(1, 5),
)
def test_exact_counts_equal_a_dict(
    batches: list[tuple[list[tuple[int, int, bool]], bool]], threshold: int
) -> None:
    """Each occurrence counts; ids that got rows are counted from 0 again."""
    exact = MinimumCount(threshold, capacity=400).build(TABLES, CPU)
    counts: Counter[tuple[int, int]] = Counter()
    for at, (batch, gets_rows) in enumerate(batches, start=1):
        ids, tables, is_new = columns(batch)
        is_new &= tables >= 0
        counts.update((id_, table) for id_, table, is_new in batch if is_new and table >= 0)
        found = exact.admit(ids, tables, is_new, epoch(at)).is_wanted
        for (id_, table, _), new, answer in zip(
            batch, is_new.tolist(), found.tolist(), strict=True
        ):
            assert answer == (new and counts[id_, table] >= threshold)
        if gets_rows:
            rows = {(id_, table) for (id_, table), count in counts.items() if count >= threshold}
            known = columns([(*key, True) for key in rows] + [(7, -1, True)])
            exact.forget(*known[:2], epoch(at))
            counts = Counter({key: count for key, count in counts.items() if key not in rows})


def test_counts_of_ids_unseen_for_longest_make_room() -> None:
    """However often they came; an id of the batch itself never does."""
    exact = MinimumCount(4, capacity=3).build(TABLES[:1], CPU)
    batches = [1, 1, 1], [2], [3], [4], [1, 1, 1], [2, 1]
    answers = [admitted(exact, ids, at=at) for at, ids in enumerate(batches, start=1)]
    assert answers == [[False] * 3, [False], [False], [False], [False] * 3, [False, True]]
    assert admitted(exact, [5, 6, 7, 8] * 4, at=9).count(True) == 3 * 4


def test_exact_counts_go_on_from_their_contents() -> None:
    config = MinimumCount(3, capacity=50)
    first, second = (config.build(tables, CPU) for tables in (TABLES, TABLES[::-1]))
    admitted(first, [1, 1, 2], table=1)
    saved = {name: tensor.clone() for name, tensor in first.contents(1).items()}
    second.load_contents(0, saved)
    assert admitted(second, [1, 2], at=2) == admitted(first, [1, 2], at=2, table=1) == [True, False]
    other = MinimumCount(3).build(TABLES, CPU)
    with pytest.raises(ValueError, match=r"counted_ids must have shape \(8,\), as .* got \(50,\)"):
        other.load_contents(0, saved)


def share_within(found: list[bool], probability: float) -> None:
    """Assert that the share of the admitted is within three standard deviations of its mean."""
    sigma = math.sqrt(probability * (1 - probability) / len(found))
    assert abs(sum(found) / len(found) - probability) <= 3 * sigma


NUM_IDS = 10_000


@pytest.mark.parametrize("count", [1, 2, 6, 7, 300])
@pytest.mark.parametrize("threshold", [7, 1000])
def test_ids_are_drawn_with_the_stated_probability(count: int, threshold: int) -> None:
    """All occurrences in one batch, duplicates side by side."""
    ids = torch.arange(NUM_IDS).repeat_interleave(count)
    tables, is_new = torch.zeros_like(ids, dtype=torch.int32), torch.ones_like(ids).bool()
    for chance, probability in {
        Chance.PROPORTIONAL: min(1.0, count / threshold),
        Chance.PER_OCCURRENCE: 1 - 0.05 ** (count / threshold),
    }.items():
        drawn = Probability(threshold=threshold, chance=chance).build(TABLES, CPU)
        answers = drawn.admit(ids, tables, is_new, epoch(1)).is_wanted.view(NUM_IDS, count)
        assert torch.equal(answers.any(1), answers.all(1))
        share_within(answers[:, 0].tolist(), probability)


@pytest.mark.parametrize("threshold", [1, 7])
def test_ids_are_drawn_anew_at_each_step(threshold: int) -> None:
    """Of all ids, each of which occurs once at each of ``threshold`` steps, 95 % end with a row."""
    for chance, probability in {
        Chance.PROPORTIONAL: 1 - (1 - 1 / threshold) ** threshold,
        Chance.PER_OCCURRENCE: 0.95,
    }.items():
        drawn = Probability(threshold=threshold, chance=chance).build(TABLES, CPU)
        steps = [admitted(drawn, list(range(NUM_IDS)), at=at) for at in range(1, threshold + 1)]
        share_within([any(of_id) for of_id in zip(*steps, strict=True)], probability)


def test_tables_are_drawn_apart() -> None:
    drawn = Probability(threshold=2, chance=Chance.PROPORTIONAL).build(TABLES, CPU)
    of_tables = [admitted(drawn, list(range(NUM_IDS)), table=table) for table in range(2)]
    share_within([a and b for a, b in zip(*of_tables, strict=True)], 0.25)


@pytest.mark.parametrize("name", FILTERS)
def test_ids_are_admitted_alike_on_any_number_of_ranks(name: str) -> None:
    """Each rank has some of the ids, and their positions in another order. A sketch is so wide
    here that no two ids share their counts."""
    config: Any = FILTERS[name]
    if isinstance(config, CountMinSketch):
        config = CountMinSketch(threshold=2, width=1 << 20)
    whole = config.build(TABLES, CPU)
    ranks = [config.build(TABLES, CPU) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for at in range(1, 6):
        ids = torch.randint(-200, 200, (500,), generator=generator).tolist()
        expected = dict(zip(ids, admitted(whole, ids, at=at), strict=True))
        for rank, of_rank in enumerate(ranks):
            own = sorted(id_ for id_ in ids if id_ % 3 == rank)
            assert admitted(of_rank, own, at=at) == [expected[id_] for id_ in own]


@pytest.mark.parametrize("name", FILTERS)
def test_only_new_ids_are_admitted(name: str, device: torch.device) -> None:
    admission = FILTERS[name].build(TABLES, device)
    batch = [(id_, table, is_new) for id_ in EDGES for table in (0, 1) for is_new in (False, True)]
    ids, tables, is_new = columns(batch * 60, device)
    found = admission.admit(ids, tables, is_new, epoch(1, device)).is_wanted
    assert found.dtype is torch.bool
    assert found[is_new].all()
    assert not found[~is_new].any()
    before = {name: tensor.clone() for name, tensor in admission.contents(0).items()}
    nothing = admission.admit(ids, tables, torch.zeros_like(is_new), epoch(2, device)).is_wanted
    assert not nothing.any()
    assert all(torch.equal(admission.contents(0)[name], was) for name, was in before.items())
    empty = columns([], device)
    assert admission.admit(*empty, epoch(3, device)).is_wanted.shape == (0,)


@pytest.mark.parametrize("name", FILTERS)
def test_nothing_depends_on_what_tensors_hold(name: str) -> None:
    """Fake tensors have no contents: whatever would wait for a GPU, or has a shape that depends on
    ids, raises."""
    with FakeTensorMode():
        admission = FILTERS[name].build(TABLES, CPU)
        rows = torch.empty(5, dtype=torch.int64), torch.empty(5, dtype=torch.int32)
        is_new = torch.empty(5, dtype=torch.bool)
        chosen = admission.admit(*rows, is_new, torch.empty(1, dtype=torch.int64))
        assert chosen.is_wanted.shape == (5,)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CountMinSketch(threshold=0, width=8), ValueError, "threshold must be from 1 to "),
        (lambda: CountMinSketch(threshold=2, width=2**31), ValueError, "width must .* got 2147483"),
        (lambda: CountMinSketch(threshold=2, width=8, depth=0), ValueError, "depth must be from 1"),
        (lambda: MinimumCount(0), ValueError, "threshold must be from 1 to "),
        (lambda: MinimumCount(2, capacity=0), ValueError, "capacity must be from 1 to "),
        (
            lambda: CountMinSketch(threshold=2.0, width=8),  # type: ignore[arg-type]
            TypeError,
            "threshold must be an int, got 2.0",
        ),
        (lambda: CountMinSketch(threshold=True, width=8), TypeError, "must be an int, got True"),
        (lambda: Probability(threshold=-1), ValueError, "threshold must be from 1 to .*, got -1"),
        (
            lambda: Probability(threshold=1, chance="equal"),  # type: ignore[arg-type]
            TypeError,
            "chance must be Chance.PROPORTIONAL or",
        ),
        (
            lambda: CountMinSketch(threshold=2, width=8).false_admissions(5, 2),
            ValueError,
            "count must be from 0 to 1, below the threshold, got 2",
        ),
    ],
)
def test_configs_are_checked(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
