"""Lines that are read ahead, over a store in RocksDB."""

import gc
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor

from tests.support.gated_table import GatedTable
from torchembed.stores import MemoryStore, ReadAheadTable, RocksDBStore, RowTable

LINE_BYTES = 5
KEYS = [-(2**63), -300, -1, 0, 1, 2, 300, 2**63 - 1]


def lines_of(keys: Tensor, version: int = 0) -> Tensor:
    """Lines that differ by key and version."""
    digits = keys[:, None] >> torch.arange(0, 8 * LINE_BYTES, 8)
    return (digits * 31 + version).to(torch.uint8)


def read(table: RowTable, keys: list[int]) -> dict[int, list[int]]:
    """The lines of those of ``keys`` that have one; the others' stay as they are."""
    lines = torch.full((len(keys), table.line_bytes), 99, dtype=torch.uint8)
    found = table.read(torch.tensor(keys, dtype=torch.int64), lines)
    assert (lines[~found] == 99).all()
    return {k: line.tolist() for k, line, f in zip(keys, lines, found.tolist(), strict=True) if f}


def wait_until_read(table: ReadAheadTable) -> None:
    """Wait until the thread reads no more, since it is done or the buffer full."""
    buffer = table._buffer

    def is_idle() -> bool:
        numbers = buffer._numbers[: buffer._end]
        is_full = not buffer.room and bool((numbers > buffer.announced.retired).all())
        return not buffer._reading and (not buffer.announced or is_full)

    with buffer.changed:
        assert buffer.changed.wait_for(is_idle, timeout=60)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[RowTable]:
    with RocksDBStore(tmp_path / "store") as store:
        made = store.table("t", LINE_BYTES)
        made.write(torch.arange(100), lines_of(torch.arange(100)))
        yield made


@pytest.fixture
def gated(table: RowTable) -> Iterator[tuple[ReadAheadTable, GatedTable]]:
    gate = GatedTable(table)
    ahead = ReadAheadTable(gate, 1000)
    yield ahead, gate
    gate.open(100)
    ahead.close()


def test_announced_lines_are_read_once_and_leave_when_they_are_taken(table: RowTable) -> None:
    ahead = ReadAheadTable(table, 20 * LINE_BYTES)
    ahead.announce(torch.tensor([7, 3, 3, 250]))
    wait_until_read(ahead)
    assert ahead.counts == (3, 0, 0)
    expected = {k: lines_of(torch.tensor([k]))[0].tolist() for k in (3, 7, 8)}
    assert read(ahead, [7, 8, 250, 7, 3]) == expected
    assert ahead.counts == (3, 4, 1)
    assert read(ahead, [7, 250]) == {7: expected[7]}
    assert ahead.counts == (3, 4, 3)
    ahead.close()


def test_announcements_made_while_the_disk_is_read_are_read_in_order_of_their_keys(
    gated: tuple[ReadAheadTable, GatedTable],
) -> None:
    ahead, gate = gated
    ahead.announce(torch.tensor([50]))
    gate.arrived()
    for keys in ([9, 30], [1, 70, 30], [20, -5]):
        ahead.announce(torch.tensor(keys))
    gate.open(2)
    wait_until_read(ahead)
    assert gate.reads == [[50], [-5, 1, 9, 20, 30, 70]]


def test_a_read_waits_for_the_lines_that_are_being_read(
    gated: tuple[ReadAheadTable, GatedTable],
) -> None:
    ahead, gate = gated
    ahead.announce(torch.tensor([5]))
    gate.arrived()
    assert read(ahead, [6])  # another one's line does not wait
    reader = threading.Thread(target=lambda: results.append(read(ahead, [5, 8])))
    results: list[dict[int, list[int]]] = []
    reader.start()
    gate.open()
    # The reader's own read, of 8, comes to the gate, too.
    gate.arrived()
    gate.open()
    reader.join(60)
    assert gate.reads == [[5], [8]]
    assert sorted(results[0]) == [5, 8]
    assert ahead.counts == (1, 1, 2)


def test_lines_that_are_changed_while_they_are_read_are_not_taken_from_that_read(
    gated: tuple[ReadAheadTable, GatedTable],
) -> None:
    ahead, gate = gated
    ahead.announce(torch.tensor([1, 2, 3]))
    gate.arrived()  # with the old lines
    ahead.write(torch.tensor([2]), lines_of(torch.tensor([2]), 7))
    ahead.delete(torch.tensor([3]))
    gate.open()
    wait_until_read(ahead)
    lines = read(ahead, [1, 2, 3])
    assert lines[2] == lines_of(torch.tensor([2]), 7)[0].tolist()
    assert sorted(lines) == [1, 2]
    assert ahead.counts == (3, 1, 2)


def test_writes_bring_the_buffer_up_to_date(table: RowTable) -> None:
    ahead = ReadAheadTable(table, 20 * LINE_BYTES)
    ahead.announce(torch.tensor([1, 2, 250, 4]))
    wait_until_read(ahead)
    keys = torch.tensor([2, 250, 2, 60])
    lines = torch.cat([lines_of(keys[:2], 1), lines_of(keys[2:], 2)])
    ahead.write(keys, lines)
    ahead.delete(torch.tensor([4, 4, 61]))
    found = read(ahead, [1, 2, 250, 4])
    assert found[2] == lines[2].tolist()
    assert found[250] == lines[1].tolist()
    assert sorted(found) == [1, 2, 250]
    assert ahead.counts == (4, 3, 1)
    ahead.close()


def test_a_full_buffer_keeps_what_is_needed_first_until_it_is_taken_or_retired(
    table: RowTable,
) -> None:
    ahead = ReadAheadTable(table, 3 * LINE_BYTES + 4)
    first = ahead.announce(torch.tensor([50, 51]))
    ahead.announce(torch.tensor([10, 20, 51]))
    wait_until_read(ahead)
    assert ahead.counts.rows_ahead == 3
    assert sorted(read(ahead, [50])) == [50]
    wait_until_read(ahead)
    assert ahead.counts == (4, 1, 0)
    ahead.retire(first)
    wait_until_read(ahead)
    # The line of 51 is the first announcement's, which made room, and then the second's.
    assert sorted(read(ahead, [10, 20, 51])) == [10, 20, 51]
    assert ahead.counts == (5, 4, 0)
    ahead.close()


def test_retired_announcements_are_not_read(gated: tuple[ReadAheadTable, GatedTable]) -> None:
    ahead, gate = gated
    ahead.announce(torch.tensor([1]))
    gate.arrived()
    old = ahead.announce(torch.tensor([2, 3]))
    ahead.announce(torch.tensor([3, 4]))
    ahead.retire(old)
    gate.open(2)
    wait_until_read(ahead)
    assert gate.reads == [[1], [3, 4]]


def test_what_a_read_has_asked_for_is_not_read_ahead_after_it(
    gated: tuple[ReadAheadTable, GatedTable],
) -> None:
    ahead, gate = gated
    piece = (1 << 20) // LINE_BYTES
    ahead = ReadAheadTable(gate, 2 * piece * LINE_BYTES)
    ahead.announce(torch.arange(piece + 3))
    gate.arrived()  # with the first piece
    read(ahead, [piece + 1])
    gate.open(2)
    wait_until_read(ahead)
    assert gate.reads[1] == [piece, piece + 2]
    ahead.close()


def test_an_error_of_the_thread_is_raised_once_by_the_next_call(
    gated: tuple[ReadAheadTable, GatedTable],
) -> None:
    ahead, gate = gated
    one, line = torch.tensor([1]), lines_of(torch.tensor([1]), 3)
    calls = [
        lambda: ahead.read(one, torch.zeros(1, LINE_BYTES, dtype=torch.uint8)),
        lambda: ahead.write(one, line),
        lambda: ahead.delete(one),
        lambda: ahead.announce(one),
        lambda: ahead.retire(1),
        lambda: ahead.chunks(5),
        ahead.num_rows,
    ]
    for call in calls:
        gate.error = OSError(5, "input/output error")
        ahead.announce(torch.tensor([1, 2]))
        gate.arrived()
        ahead.announce(torch.tensor([3]))
        gate.open()
        wait_until_read(ahead)
        with pytest.raises(OSError, match="input/output error"):
            call()
        assert read(ahead, [1]) == {1: lines_of(one)[0].tolist()}
    assert gate.reads == [[1, 2]] * len(calls)


def test_a_read_that_waits_for_lines_that_fail_raises(
    gated: tuple[ReadAheadTable, GatedTable],
) -> None:
    ahead, gate = gated
    gate.error = OSError(5, "input/output error")
    ahead.announce(torch.tensor([5]))
    gate.arrived()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    with pytest.raises(OSError, match="input/output error"):
        read(ahead, [5])
    opener.join()


def test_a_closed_thread_ends_and_another_starts(table: RowTable) -> None:
    ahead = ReadAheadTable(table, 1000)
    for number in (1, 2):
        assert ahead.announce(torch.tensor([1, 2])) == number
        (thread,) = (t for t in threading.enumerate() if "lines of t to come" in t.name)
        ahead.close()
        assert not thread.is_alive()
        assert read(ahead, [1, 300]) == {1: lines_of(torch.tensor([1]))[0].tolist()}
        ahead.close()


def test_the_thread_ends_with_its_table(table: RowTable) -> None:
    ahead = ReadAheadTable(table, 1000)
    ahead.announce(torch.tensor([1]))
    thread = ahead._thread
    assert thread is not None
    del ahead
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_chunks_and_counts_are_the_tables(table: RowTable) -> None:
    ahead = ReadAheadTable(table, 1000)
    assert (ahead.name, ahead.line_bytes, ahead.num_rows()) == ("t", LINE_BYTES, 100)
    assert [len(chunk.keys) for chunk in ahead.chunks(60)] == [60, 40]


@pytest.mark.parametrize(
    ("buffer_bytes", "error", "message"),
    [
        (4, ValueError, "buffer_bytes must be at least 5, the bytes of a line of table 't', got 4"),
        (0, ValueError, "buffer_bytes must be positive, got 0"),
        (1e6, TypeError, "buffer_bytes must be an int, got 1000000.0"),
    ],
)
def test_wrong_sizes_of_the_buffer(buffer_bytes: int, error: type[Exception], message: str) -> None:
    table = MemoryStore().table("t", LINE_BYTES)
    with pytest.raises(error, match=message):
        ReadAheadTable(table, buffer_bytes)


def test_announced_keys_are_checked_as_those_of_reads(table: RowTable) -> None:
    ahead = ReadAheadTable(table, 1000)
    with pytest.raises(TypeError, match=r"keys must be int64, got int32; call \.long\(\)"):
        ahead.announce(torch.arange(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"keys must have 1 dimension"):
        ahead.announce(torch.zeros(2, 2, dtype=torch.int64))


def test_many_threads_read_and_write_while_lines_are_read_ahead(table: RowTable) -> None:
    """Each thread changes keys of its own, and must find each as it left it."""
    ahead = ReadAheadTable(table, 40 * LINE_BYTES)
    failures: list[BaseException] = []

    def use(first: int) -> None:
        try:
            generator = torch.Generator().manual_seed(first)
            versions = torch.zeros(25, dtype=torch.int64)
            for step in range(60):
                places = torch.randint(25, (12,), generator=generator)
                number = ahead.announce(places + first)
                lines = torch.zeros(12, LINE_BYTES, dtype=torch.uint8)
                assert ahead.read(places + first, lines).all()
                known = lines_of(places + first) + versions[places][:, None]
                assert torch.equal(lines, known.to(torch.uint8))
                changed = places.unique()[:6]
                versions[changed] = step
                ahead.write(changed + first, (lines_of(changed + first) + step).to(torch.uint8))
                ahead.retire(number)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failures.append(error)

    threads = [threading.Thread(target=use, args=(25 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ahead.close()
    if failures:
        raise failures[0]


class ReadAheadMachine(RuleBasedStateMachine):
    """Any history of calls, beside a dictionary; the thread runs as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = RocksDBStore(self.folder)
        self.ahead = ReadAheadTable(self.store.table("t", 2), 5 * 2)
        self.model: dict[int, list[int]] = {}
        self.announced = 0

    keys = st.lists(st.sampled_from(KEYS), max_size=10)

    @rule(keys=keys)
    def announce(self, keys: list[int]) -> None:
        self.announced = self.ahead.announce(torch.tensor(keys, dtype=torch.int64))

    @rule(back=st.integers(0, 3))
    def retire(self, back: int) -> None:
        self.ahead.retire(self.announced - back)

    @rule()
    def wait(self) -> None:
        wait_until_read(self.ahead)

    @rule(keys=keys, data=st.data())
    def write(self, keys: list[int], data: st.DataObject) -> None:
        byte = st.integers(0, 255)
        lines = [[data.draw(byte), data.draw(byte)] for _ in keys]
        joined = torch.tensor(lines, dtype=torch.uint8).view(-1, 2)
        self.ahead.write(torch.tensor(keys, dtype=torch.int64), joined)
        self.model |= zip(keys, lines, strict=True)

    @rule(keys=keys)
    def delete(self, keys: list[int]) -> None:
        self.ahead.delete(torch.tensor(keys, dtype=torch.int64))
        for key in keys:
            self.model.pop(key, None)

    @rule(keys=keys)
    def read(self, keys: list[int]) -> None:
        assert read(self.ahead, keys) == {k: self.model[k] for k in keys if k in self.model}

    @rule()
    def close(self) -> None:
        self.ahead.close()

    @invariant()
    def buffer_is_bounded_and_whole(self) -> None:
        buffer = self.ahead._buffer
        with buffer.changed:
            assert len(buffer._slots) + len(buffer._free) == buffer._end <= 5
            assert {*buffer._slots.values(), *buffer._free} == set(range(buffer._end))
            for key, slot in buffer._slots.items():
                line = buffer._lines[slot].tolist() if buffer._has_line[slot] else None
                assert self.model.get(key) == line

    def teardown(self) -> None:
        self.ahead.close()
        self.store.close()
        shutil.rmtree(self.folder)


def test_any_history() -> None:
    settings = hypothesis.settings(max_examples=20, stateful_step_count=30)
    run_state_machine_as_test(ReadAheadMachine, settings=settings)
