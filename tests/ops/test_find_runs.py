"""``find_runs`` against groups in Python dicts."""

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import lanes, oracle
from tests.support.bags import random_rows
from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tracing import compiled_once
from tests.support.values import not_contiguous
from torchembed.core.types import RUN_CHUNK
from torchembed.ops.segments import Runs, find_runs


def check(rows: Tensor, num_rows: int) -> None:
    """Every field of the result is what the dict of groups says, padding included."""
    runs = find_runs(rows, num_rows)
    ids = rows.tolist()
    num_ids = len(ids)
    unique, positions = oracle.find_runs(ids)
    padding = num_ids - len(unique)
    missing = [position for position, row in enumerate(ids) if row < 0]
    starts = [len(missing)]
    for group in positions:
        starts.append(starts[-1] + len(group))
    assert runs.unique_rows.tolist() == unique + [-1] * padding
    assert runs.order.tolist() == missing + [position for group in positions for position in group]
    assert runs.starts.tolist() == starts + [num_ids] * padding
    assert runs.num_runs.tolist() == [len(unique)]
    assert runs.chunk_runs.tolist() == oracle.chunk_runs(starts, num_ids)
    assert runs.unique_rows.dtype == rows.dtype
    assert {t.dtype for t in runs[1:]} == {torch.int32}
    assert {t.device for t in runs} == {rows.device}


@st.composite
def rows_of_a_table(draw: st.DrawFn) -> tuple[list[int], int]:
    num_rows = draw(st.sampled_from([1, 2, 7, 256, 2**16 + 1, 2**31 - 1]))
    near_the_ends = st.one_of(
        st.integers(0, min(num_rows - 1, 4)), st.integers(max(num_rows - 5, 0), num_rows - 1)
    )
    row = st.one_of(st.just(-1), near_the_ends, st.integers(0, num_rows - 1))
    return draw(st.lists(row, max_size=40)), num_rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_finds_the_groups_of_a_dict(dtype: torch.dtype, device: torch.device, sizes: Sizes) -> None:
    @settings(max_examples=sizes.num_examples, derandomize=True, database=None)
    @given(rows_of_a_table())
    def run(drawn: tuple[list[int], int]) -> None:
        rows, num_rows = drawn
        check(torch.tensor(rows, dtype=dtype, device=device), num_rows)

    run()


@pytest.mark.parametrize(
    "rows", [[], [-1], [0], [-1, -1, -1], [4, 4, 4], [4], [3, 2, 1, 0], [0, 1, 2, 3, 4]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edge_cases(rows: list[int], dtype: torch.dtype, device: torch.device) -> None:
    check(torch.tensor(rows, dtype=dtype, device=device), 5)


def test_worked_example(device: torch.device) -> None:
    runs = find_runs(torch.tensor([5, 2, -1, 5], device=device), 6)
    assert [field.tolist() for field in runs] == [
        [2, 5, -1, -1],
        [1, 2, 4, 4, 4],
        [2, 1, 0, 3],
        [2],
        [],
    ]


@st.composite
def long_runs(draw: st.DrawFn) -> list[int]:
    """Missing rows, then up to four runs, of no chunk, one, several, or more than a group's."""
    length = st.one_of(
        st.integers(0, 3 * RUN_CHUNK),
        st.builds(
            lambda num_chunks, more: num_chunks * RUN_CHUNK + more,
            st.sampled_from([1, 2, RUN_CHUNK]),
            st.integers(-1, 1),
        ),
    )
    num_missing = draw(st.one_of(st.just(0), st.integers(0, 2 * RUN_CHUNK)))
    lengths = draw(st.lists(length, max_size=4))
    rows = [row for row, count in enumerate(lengths) for _ in range(count)]
    return [-1] * num_missing + rows


def test_finds_whole_chunks(device: torch.device, sizes: Sizes) -> None:
    @settings(max_examples=2 * sizes.num_examples, derandomize=True, database=None)
    @given(long_runs(), st.randoms(use_true_random=False))
    def run(rows: list[int], random: Random) -> None:
        random.shuffle(rows)
        check(torch.tensor(rows, dtype=torch.int64, device=device), 4)

    run()


def test_chunks_of_a_worked_example(device: torch.device) -> None:
    rows = torch.arange(3, device=device).repeat_interleave(torch.tensor([3, 60, 2], device=device))
    assert find_runs(rows, 3).chunk_runs.tolist() == [1, -1]


@pytest.mark.parametrize("num_ids", [1023, 1025, 5000, 70_000])
def test_many_ids(num_ids: int, device: torch.device) -> None:
    if lanes.is_interpreted():
        num_ids //= 50
    check(random_rows(num_ids, 300, seed=0).to(device), 300)
    check(random_rows(num_ids, 10 * num_ids, seed=1).to(device, torch.int32), 10 * num_ids)


def test_rows_beyond_32_bits(device: torch.device) -> None:
    num_rows = 2**40
    rows = [num_rows - 1, 2**32, 0, 2**33, 2**32, -1, 2**31, num_rows - 1]
    check(torch.tensor(rows, device=device), num_rows)


def test_a_table_without_rows(device: torch.device) -> None:
    check(torch.tensor([-1, -1], device=device), 0)


def test_rows_need_not_be_contiguous(device: torch.device) -> None:
    check(not_contiguous(torch.tensor([5, 2, -1, 5, 1], device=device)), 6)


def test_repeats_its_bits(device: torch.device, sizes: Sizes, fastest_algorithms: None) -> None:
    rows = random_rows(sizes.num_parallel_ids, sizes.num_rows, seed=0).to(device)
    assert_repeats(lambda: find_runs(rows, sizes.num_rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_opcheck(dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.tensor([5, 2, -1, 5, 1] * 8, device=device, dtype=dtype)
    torch.library.opcheck(torch.ops.torchembed.find_runs.default, (rows, 6))


def test_compiles_whole_and_once_for_every_size(device: torch.device, sizes: Sizes) -> None:

    def sizes_of_runs(rows: Tensor, num_rows: int) -> tuple[Runs, Tensor]:
        runs = find_runs(rows, num_rows)
        return runs, runs.starts.diff()

    compiled = compiled_once(sizes_of_runs)
    # 64 ids at least: the compiler keeps none, one and more slots of chunks apart.
    for num_ids in (70, 71, 150):
        rows = random_rows(num_ids, sizes.num_rows, seed=num_ids).to(device)
        runs, lengths = compiled(rows, sizes.num_rows)
        expected, expected_lengths = sizes_of_runs(rows, sizes.num_rows)
        assert isinstance(runs, Runs)
        assert all(map(torch.equal, runs, expected))
        assert torch.equal(lengths, expected_lengths)


ERRORS: dict[str, tuple[type[Exception], str, Any]] = {
    "dtype": (
        TypeError,
        r"^rows must be int32 or int64, got float32; call \.long\(\)$",
        lambda: torch.zeros(3),
    ),
    "shape": (
        ValueError,
        r"^rows must have 1 dimension\(s\), got shape \(2, 2\); reshape it$",
        lambda: torch.zeros(2, 2, dtype=torch.int64),
    ),
    "too many": (
        ValueError,
        r"^rows must hold fewer than 2\*\*31 ids, got 2147483648; split the batch$",
        lambda: torch.zeros(2**31, dtype=torch.int64, device="meta"),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    error, message, rows = ERRORS[name]
    with pytest.raises(error, match=message):
        find_runs(rows(), 5)
