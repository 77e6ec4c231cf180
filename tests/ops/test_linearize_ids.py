"""``linearize_ids`` against Python integers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import oracle
from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tracing import compiled_once
from tests.support.values import not_contiguous
from torchembed.core.types import OnBadId
from torchembed.ops.linearize_ids import LinearRows, linearize_ids

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """Ids of ``len(first_rows)`` features, with ``spare`` more that belong to no bag."""

    values: Sequence[int]
    lengths: Sequence[int]
    batch_size: int
    first_rows: Sequence[int]
    num_rows: Sequence[int]
    hotness: Sequence[int] | None = None
    spare: Sequence[int] = ()

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        def integers(numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(numbers), dtype=dtype, device=device)

        return (
            integers([*self.values, *self.spare], dtype),
            integers(self.first_rows, torch.int64),
            integers(self.num_rows, torch.int64),
        )

    def grouping(self, device: torch.device, offsets_dtype: torch.dtype) -> dict[str, Any]:
        if self.hotness is not None:
            return {"hotness": self.hotness, "batch_size": self.batch_size}
        offsets = torch.tensor([0, *self.lengths]).cumsum(0).to(device, offsets_dtype)
        return {"offsets": offsets, "batch_size": self.batch_size}


def check(
    ids: Ids,
    on_bad_id: OnBadId,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.int64,
    rows_dtype: torch.dtype = torch.int64,
    offsets_dtype: torch.dtype = torch.int64,
) -> None:
    """Rows and the first bad position are what Python integers give."""
    result = linearize_ids(
        *ids.tensors(device, dtype),
        **ids.grouping(device, offsets_dtype),
        on_bad_id=on_bad_id,
        rows_dtype=rows_dtype,
    )
    rows, first_bad = oracle.linearize_ids(
        ids.values,
        ids.lengths,
        ids.batch_size,
        ids.first_rows,
        ids.num_rows,
        clamp=on_bad_id is OnBadId.CLAMP,
    )
    num_ids = len(ids.values) + len(ids.spare)
    assert result.rows.tolist() == rows + [-1] * len(ids.spare)
    assert result.first_bad.tolist() == [num_ids if first_bad is None else first_bad]
    assert result.rows.dtype == rows_dtype and result.first_bad.dtype == torch.int64
    assert result.rows.device == device or result.rows.device.type == device.type


@st.composite
def ids_of_tables(draw: st.DrawFn) -> Ids:
    num_features = draw(st.integers(0, 4))
    batch_size = draw(st.integers(0, 4))
    num_rows = draw(st.lists(st.integers(0, 6), min_size=num_features, max_size=num_features))
    first_rows = draw(
        st.lists(st.integers(0, 2**31 - 7), min_size=num_features, max_size=num_features)
    )
    num_bags = num_features * batch_size
    hotness = None
    if draw(st.booleans()):
        hotness = draw(st.lists(st.integers(0, 3), min_size=num_features, max_size=num_features))
        lengths = [count for count in hotness for _ in range(batch_size)]
    else:
        lengths = draw(st.lists(st.integers(0, 3), min_size=num_bags, max_size=num_bags))
    value = st.one_of(st.integers(-2, 7), st.sampled_from([-(2**31), 2**31 - 1]))
    values = draw(st.lists(value, min_size=sum(lengths), max_size=sum(lengths)))
    spare = draw(st.lists(value, max_size=3)) if hotness is None else []
    return Ids(
        values=values,
        lengths=lengths,
        batch_size=batch_size,
        first_rows=first_rows,
        num_rows=num_rows,
        hotness=hotness,
        spare=spare,
    )


@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("on_bad_id", list(OnBadId))
def test_gives_what_python_integers_give(
    on_bad_id: OnBadId,
    dtype: torch.dtype,
    rows_dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
) -> None:
    @settings(max_examples=sizes.num_examples, derandomize=True, database=None)
    @given(ids_of_tables(), st.sampled_from([torch.int32, torch.int64]))
    def run(ids: Ids, offsets_dtype: torch.dtype) -> None:
        check(
            ids,
            on_bad_id,
            device,
            dtype=dtype,
            rows_dtype=rows_dtype,
            offsets_dtype=offsets_dtype,
        )

    run()


@pytest.mark.parametrize("on_bad_id", list(OnBadId))
def test_extreme_ids_and_far_rows(on_bad_id: OnBadId, device: torch.device) -> None:
    values = [INT64_MIN, -1, 0, 2**40 - 1, 2**40, INT64_MAX]
    ids = Ids(
        values=values,
        lengths=[6],
        batch_size=1,
        first_rows=[2**41],
        num_rows=[2**40],
    )
    check(ids, on_bad_id, device)


@pytest.mark.parametrize("on_bad_id", list(OnBadId))
def test_many_features(on_bad_id: OnBadId, device: torch.device) -> None:
    num_features, batch_size = 130, 2
    lengths = [(7 * bag) % 3 for bag in range(num_features * batch_size)]
    ids = Ids(
        values=[position % 9 - 1 for position in range(sum(lengths))],
        lengths=lengths,
        batch_size=batch_size,
        first_rows=[10 * feature for feature in range(num_features)],
        num_rows=[1 + feature % 8 for feature in range(num_features)],
    )
    check(ids, on_bad_id, device)


def test_features_may_share_a_table(device: torch.device) -> None:
    ids = Ids(
        values=[1, 2, 1, 2], lengths=[1] * 4, batch_size=2, first_rows=[5, 5], num_rows=[3, 3]
    )
    check(ids, OnBadId.RAISE, device)


def test_inputs_need_not_be_contiguous(device: torch.device) -> None:
    values, first_rows, num_rows = (
        not_contiguous(torch.tensor(numbers, device=device))
        for numbers in ([1, 2, 9, 0, 1], [5, 50], [3, 4])
    )
    offsets = not_contiguous(torch.tensor([0, 2, 3, 3, 5], device=device))
    result = linearize_ids(values, first_rows, num_rows, offsets=offsets, batch_size=2)
    assert result.rows.tolist() == [6, 7, -1, 50, 51]
    assert result.first_bad.tolist() == [2]


def large_case(batch_size: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, (3 * batch_size,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.randint(-2, 105, (int(offsets[-1]),), generator=generator)
    tensors = (values, torch.tensor([0, 100, 200]), torch.tensor([100, 100, 50]))
    return [tensor.to(device) for tensor in tensors], offsets.to(device)


def test_repeats_its_bits(device: torch.device, sizes: Sizes, fastest_algorithms: None) -> None:
    batch_size = sizes.num_parallel_ids // 6
    tensors, offsets = large_case(batch_size, device)
    assert_repeats(lambda: linearize_ids(*tensors, offsets=offsets, batch_size=batch_size))


@pytest.mark.parametrize("on_bad_id", list(OnBadId))
def test_opcheck(on_bad_id: OnBadId, device: torch.device) -> None:
    op = torch.ops.torchembed.linearize_ids.default
    tensors, offsets = large_case(5, device)
    values, *tables = tensors
    tail = (*tables, 5, int(on_bad_id), torch.int32)
    torch.library.opcheck(op, (values, offsets, [], *tail))
    torch.library.opcheck(op, (values[:20].int(), None, [1, 0, 3], *tail))


def test_compiles_whole_and_once_for_every_size(device: torch.device) -> None:

    def rows_and_count(*tensors: Tensor, offsets: Tensor, batch_size: int) -> LinearRows:
        result = linearize_ids(*tensors, offsets=offsets, batch_size=batch_size)
        return LinearRows(result.rows + 1, result.first_bad)

    compiled = compiled_once(rows_and_count)
    for batch_size in (4, 5, 9):
        tensors, offsets = large_case(batch_size, device)
        result = compiled(*tensors, offsets=offsets, batch_size=batch_size)
        expected = rows_and_count(*tensors, offsets=offsets, batch_size=batch_size)
        assert all(map(torch.equal, result, expected))


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "values dtype": (
        TypeError,
        r"^values must be int32 or int64, got float32; call \.long\(\)$",
        {"values": torch.zeros(4)},
    ),
    "values shape": (
        ValueError,
        r"^values must have 1 dimension\(s\), got shape \(2, 2\); reshape it$",
        {"values": torch.zeros(2, 2, dtype=torch.int64)},
    ),
    "first_rows dtype": (
        TypeError,
        r"^first_rows must be int64, got int32; call \.long\(\)$",
        {"first_rows": torch.zeros(2, dtype=torch.int32)},
    ),
    "num_rows dtype": (
        TypeError,
        r"^num_rows must be int64, got int32; call \.long\(\)$",
        {"num_rows": torch.zeros(2, dtype=torch.int32)},
    ),
    "num_rows length": (
        ValueError,
        r"^num_rows must hold 2 elements \(as first_rows has\), got 3$",
        {"num_rows": torch.ones(3, dtype=torch.int64)},
    ),
    "first_rows device": (
        ValueError,
        r"^first_rows must be on cpu as values is, got meta; call \.to\('cpu'\)$",
        {"first_rows": torch.zeros(2, dtype=torch.int64, device="meta")},
    ),
    "num_rows device": (
        ValueError,
        r"^num_rows must be on cpu as values is, got meta; call \.to\('cpu'\)$",
        {"num_rows": torch.zeros(2, dtype=torch.int64, device="meta")},
    ),
    "offsets length": (
        ValueError,
        r"^offsets must hold 5 elements \(num_features \* batch_size \+ 1\), got 2$",
        {"hotness": None, "offsets": torch.tensor([0, 4])},
    ),
    "values for the hotness": (
        ValueError,
        r"^values must hold 6 elements \(sum\(hotness\) \* batch_size\), got 4$",
        {"hotness": [1, 2]},
    ),
    "rows dtype": (
        TypeError,
        r"^rows_dtype must be int32 or int64, got float32$",
        {"rows_dtype": torch.float32},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    error, message, changes = ERRORS[name]
    arguments: dict[str, Any] = {
        "values": torch.zeros(4, dtype=torch.int64),
        "first_rows": torch.zeros(2, dtype=torch.int64),
        "num_rows": torch.ones(2, dtype=torch.int64),
        "hotness": [1, 1],
        "batch_size": 2,
    } | changes
    with pytest.raises(error, match=message):
        linearize_ids(**arguments)
