"""Streams of rows against a dict: whatever comes out by key goes in by key, however divided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchembed
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.tables import (
    RowChunk,
    Table,
    TableSet,
    TableSpec,
    read_rows,
    row_chunks,
    row_ranges,
    write_rows,
)

NUM_COLUMNS = 3


def make_tables(
    num_rows: int, bounds: list[int], kind: OptimizerKind | None, dtype: torch.dtype, seed: int = 0
) -> list[Table]:
    """One table divided by rows at ``bounds``, in one group with another one before it."""
    spec = TableSpec(name="t", num_rows=num_rows, dim=NUM_COLUMNS, dtype=dtype, seed=seed)
    other = Table(TableSpec(name="other", num_rows=2, dim=NUM_COLUMNS, dtype=dtype))
    ends = [*bounds, num_rows]
    parts = [
        Table(spec, first_row=first, num_rows=last - first)
        for first, last in zip([0, *bounds], ends, strict=True)
    ]
    tables = TableSet([other, *parts], lookup_keys=[None] * (1 + len(parts)))
    for group in tables.groups if kind is not None else ():
        assert kind is not None
        group.set_rule(UpdateRule(kind=kind), 0.25)
        for number, state in enumerate(group.states):
            state.copy_(torch.arange(state.numel()).reshape(state.shape) + 1000 * number)
    return parts


Entry = tuple[list[float], dict[str, Tensor]]


def as_dict(tables: list[Table], max_bytes: int) -> dict[int, Entry]:
    found: dict[int, Entry] = {}
    for table in tables:
        for chunk in row_chunks(table, max_bytes):
            assert chunk.keys.dtype == torch.int64
            row_bytes = chunk.rows[:1].nbytes + sum(s[:1].nbytes for s in chunk.states.values())
            assert len(chunk.keys) == 1 or len(chunk.keys) * row_bytes <= max_bytes
            for place, key in enumerate(chunk.keys.tolist()):
                assert key not in found
                states = {name: state[place].clone() for name, state in chunk.states.items()}
                found[key] = chunk.rows[place].tolist(), states
    return found


def assert_equal(ours: dict[int, Entry], theirs: dict[int, Entry]) -> None:
    assert list(ours) == list(theirs)
    for key, (row, states) in theirs.items():
        assert ours[key][0] == row
        assert list(ours[key][1]) == list(states)
        assert all(torch.equal(ours[key][1][name], state) for name, state in states.items())


@st.composite
def divided(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A number of rows, and two divisions of them, empty parts included."""
    num_rows = draw(st.integers(0, 12))
    bounds = st.lists(st.integers(0, num_rows), max_size=3).map(sorted)
    return num_rows, draw(bounds), draw(bounds)


@given(
    division=divided(),
    kind=st.sampled_from([None, *OptimizerKind]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    max_bytes=st.integers(1, 200),
    data=st.data(),
)
def test_rows_come_back_under_another_division(
    division: tuple[int, list[int], list[int]],
    kind: OptimizerKind | None,
    dtype: torch.dtype,
    max_bytes: int,
    data: st.DataObject,
) -> None:
    num_rows, before, after = division
    sources = make_tables(num_rows, before, kind, dtype)
    expected = as_dict(sources, max_bytes)
    assert list(expected) == list(range(num_rows))
    targets = make_tables(num_rows, after, kind, dtype, seed=1)
    for source in sources:
        for chunk in row_chunks(source, max_bytes):
            order = torch.tensor(data.draw(st.permutations(range(len(chunk.keys)))))
            for target in targets:
                here = chunk.keys[order.long()] - target.first_row
                taken = order.long()[(here >= 0) & (here < target.num_rows)]
                states = {name: state[taken] for name, state in chunk.states.items()}
                write_rows(target, RowChunk(chunk.keys[taken], chunk.rows[taken], states))
    assert_equal(as_dict(targets, 50), expected)


def test_chunks_are_views_of_the_columns_that_are_here() -> None:
    spec = TableSpec(name="t", num_rows=6, dim=5)
    table = Table(spec, first_row=2, num_rows=3, first_column=1, num_columns=2)
    TableSet([table], lookup_keys=[None])
    (chunk,) = row_chunks(table, 1 << 20)
    assert chunk.keys.tolist() == [2, 3, 4]
    assert chunk.rows.shape == (3, 2)
    assert chunk.states == {}
    chunk.rows.fill_(7.0)
    assert (table.parameter == 7.0).all()


def test_rows_are_converted_and_states_may_be_left_out() -> None:
    (table,) = make_tables(4, [], OptimizerKind.ADAM, torch.bfloat16)
    before = read_rows(table, range(4)).states["exp_avg"].clone()
    write_rows(table, RowChunk(torch.tensor([3, 0]), torch.ones(2, 3, dtype=torch.float64), {}))
    assert (table.parameter[[0, 3]] == 1.0).all()
    assert torch.equal(read_rows(table, range(4)).states["exp_avg"], before)
    assert read_rows(table, range(1, 2), with_states=False).states == {}


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    table = make_tables(6, [2], OptimizerKind.ADAGRAD, torch.float32)[1]
    before = table.parameter.detach().clone()
    keys, rows = torch.tensor([2, 5]), torch.ones(2, NUM_COLUMNS)
    for chunk, kind, message in (
        (RowChunk(torch.tensor([1, 2]), rows, {}), IndexError, r"in \[2, 6\), .* t holds .*1 to 2"),
        (RowChunk(torch.tensor([5, 6]), rows, {}), IndexError, r"got 5 to 6"),
        (RowChunk(keys, rows, {"m": rows}), ValueError, r"states must be among \['sum'\], got 'm'"),
        (RowChunk(keys, rows[:, :2], {}), ValueError, r"rows must have shape \(2, 3\), got \(2, 2"),
        (RowChunk(keys, rows, {"sum": rows[:1]}), ValueError, r"state 'sum' must have shape \(2, "),
    ):
        with pytest.raises(kind, match=message):
            write_rows(table, chunk)
    for wrong in (range(1, 3), range(2, 7), range(2, 6, 2)):
        with pytest.raises(IndexError, match=r"keys must be consecutive and in \[2, 6\)"):
            read_rows(table, wrong)
    assert torch.equal(table.parameter, before)


def test_ranges_cover_all_rows() -> None:
    assert list(row_ranges(7, 4, 12)) == [range(3), range(3, 6), range(6, 7)]
    assert list(row_ranges(2, 100, 1)) == [range(1), range(1, 2)]
    assert list(row_ranges(3, 0, 2)) == [range(2), range(2, 3)]
    assert list(row_ranges(0, 4, 12)) == []


def test_states_are_named_as_the_optimizers_name_them() -> None:
    for optimizer in ("SGD", "Adagrad", "RowwiseAdagrad", "Adam"):
        kind = getattr(torchembed.optim, optimizer)
        assert UpdateRule(kind=kind.kind).state_names == kind.state_names
