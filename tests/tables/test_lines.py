"""Lines of rows on disk: their layout, where they are kept, and the thread that moves them."""

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchembed.ops.row_cache import RowMoves
from torchembed.stores.errors import CorruptStoreError
from torchembed.tables import Table, TableSpec, Uniform
from torchembed.tables.tiers import line_moves
from torchembed.tables.tiers.host_lines import HostLines
from torchembed.tables.tiers.initial_lines import InitialLines, RowIdentities
from torchembed.tables.tiers.line_layout import LineLayout
from torchembed.tables.tiers.line_moves import LineMover, MoveBuffer, MovedLines
from torchembed.tables.tiers.line_store import LineStore

CPU = torch.device("cpu")
NUM_PLACES, NUM_ROWS = 4, 9


def test_a_line_is_the_weight_and_then_each_state() -> None:
    """float16 1, 2 and float32 3, and 4 5."""
    weight = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float16)
    tensors = [weight, torch.tensor([0.0, 3.0]), torch.tensor([[0.0, 0.0], [4.0, 5.0]])]
    layout = LineLayout([tensor.to("meta") for tensor in tensors])
    assert layout.line_bytes == 4 + 4 + 8
    lines = layout.packed(tensors, torch.tensor([1]))
    assert lines[0, :4].view(torch.float16).tolist() == [1, 2]
    assert lines[0, 4:].view(torch.float32).tolist() == [3, 4, 5]
    found = layout.empty(3)
    for tensor in found:
        tensor.zero_()
    layout.unpack(lines, found, torch.tensor([2]))
    for tensor, own in zip(found, tensors, strict=True):
        assert torch.equal(tensor[2], own[1])
        assert not tensor[:2].any()
    layout.unpack(lines, found[:1], torch.tensor([0]))
    assert found[0][0].tolist() == [1, 2]
    assert not found[1][0].any()


def test_layouts_are_equal_where_lines_hold_the_same() -> None:
    layout = LineLayout([torch.zeros(3, 2), torch.zeros(3)])
    assert layout.equals(LineLayout([torch.zeros(7, 2), torch.zeros(7)]))
    assert not layout.equals(LineLayout([torch.zeros(3, 2)]))
    assert not layout.equals(LineLayout([torch.zeros(3, 3), torch.zeros(3)]))
    assert not layout.equals(LineLayout([torch.zeros(3, 2).half(), torch.zeros(3)]))


def made_lines(path: Path) -> tuple[HostLines, Table]:
    """Host memory of some rows of one table with one state."""
    table = Table(TableSpec(name="t", num_rows=NUM_ROWS, dim=3, initializer=Uniform(), seed=5))
    tensors = [torch.full((NUM_PLACES, 3), torch.nan), torch.full((NUM_PLACES,), torch.nan)]
    initial = InitialLines([table], [0, NUM_ROWS], 0.5, None)
    return HostLines(tensors, LineStore(path, LineLayout(tensors)), initial), table


def int64(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def initial_rows(table: Table) -> Tensor:
    rows = torch.empty(NUM_ROWS, 3)
    table.fill_rows(rows, torch.arange(NUM_ROWS))
    return rows


moves = st.lists(
    st.tuples(
        st.permutations(range(NUM_PLACES)), st.lists(st.integers(0, NUM_ROWS - 1), max_size=4)
    ),
    max_size=12,
)


@given(moves=moves)
def test_rows_that_come_and_go_keep_their_values(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[list[int], list[int]]]
) -> None:
    """Against a dictionary; each row that is in host memory is changed before it leaves."""
    lines, table = made_lines(tmp_path_factory.mktemp("rows"))
    weights, states = dict(enumerate(initial_rows(table))), dict.fromkeys(range(NUM_ROWS), 0.5)
    held: dict[int, int] = {}
    for number, (places, wanted) in enumerate(moves):
        rows = sorted(set(wanted) - set(held.values()))
        chosen = places[: len(rows)]
        written = [held.get(place, -1) for place in chosen]
        lines.move(MovedLines(*map(int64, (chosen, written, rows)), None))
        for place, row in zip(chosen, rows, strict=True):
            held[place] = row
            assert torch.equal(lines.tensors[0][place], weights[row])
            assert lines.tensors[1][place].item() == states[row]
            lines.tensors[0][place] += number
            lines.tensors[1][place] = number
            weights[row], states[row] = weights[row] + number, float(number)
    on_disk = [row for row in range(NUM_ROWS) if row not in held.values()]
    weight, state = lines.read(int64(on_disk), None)
    for place, row in enumerate(on_disk):
        assert torch.equal(weight[place], weights[row])
        assert state[place].item() == states[row]
    lines.store.clear()


def test_a_new_row_has_no_line_of_the_id_before_it(tmp_path: Path) -> None:
    lines, table = made_lines(tmp_path)
    lines.tensors[0].fill_(7.0)
    lines.tensors[1].fill_(7.0)
    lines.save(torch.tensor([0, 1]), torch.tensor([2, 3]))
    ids, are_new = torch.tensor([6, 8]), torch.tensor([True, False])
    weight, state = lines.read(torch.tensor([2, 3]), RowIdentities(ids, are_new))
    assert torch.equal(weight[0], initial_rows(table)[6])
    assert weight[1].tolist() == [7, 7, 7]
    assert state.tolist() == [0.5, 7]


def buffer_of(*rows: int) -> MoveBuffer:
    """The moves of ``rows`` into as many places, arrived."""
    buffer = MoveBuffer(len(rows) + 2, False, CPU)
    copy_moves(buffer, rows)
    return buffer


def copy_moves(buffer: MoveBuffer, rows: tuple[int, ...]) -> None:
    count, spare = len(rows), [-1, -1]
    numbers = torch.tensor([*range(count), *spare])
    read = torch.tensor([*rows, *spare])
    count_of = torch.tensor([count])
    buffer.copy_from(RowMoves(numbers.int(), torch.full_like(read, -1), read, count_of), None)


def test_moves_are_done_in_order_once_they_have_arrived() -> None:
    mover, done = LineMover(), list[list[int]]()

    def move(moves: MovedLines) -> None:
        assert threading.current_thread() is not threading.main_thread()
        done.append(moves.read_rows.tolist())

    late = MoveBuffer(3, False, CPU)
    mover.submit(late, move)
    for row in range(3):
        mover.submit(buffer_of(row, row + 5), move)
    time.sleep(0.05)
    assert done == []
    copy_moves(late, (4,))
    mover.wait()
    assert done == [[4], [0, 5], [1, 6], [2, 7]]
    mover.stop()
    mover.submit(buffer_of(8), move)
    mover.wait()
    assert done[-1] == [8]
    mover.stop()


def test_what_fails_is_raised_again_and_again_and_nothing_is_moved_after_it() -> None:
    mover, done = LineMover(), list[int]()

    def fail(_: MovedLines) -> None:
        raise CorruptStoreError("text")

    mover.submit(buffer_of(1), fail)
    mover.submit(buffer_of(2), lambda _: done.append(2))
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match="text"):
            mover.wait()
    mover.submit(buffer_of(3), lambda _: done.append(3))
    with pytest.raises(CorruptStoreError, match="text"):
        mover.wait()
    assert not done
    mover.stop()


def test_a_thread_that_is_stopped_leaves_what_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_moves, "_CLOSE_SECONDS", 0.05)
    before, done = set(threading.enumerate()), list[int]()
    mover = LineMover()
    mover.submit(MoveBuffer(3, False, CPU), lambda _: done.append(1))
    mover.stop()
    assert set(threading.enumerate()) <= before
    assert not done
    with pytest.raises(RuntimeError, match="rows on disk were not read for a step that was not"):
        mover.wait()
