"""A thread that reads ahead: every batch once, in order, whatever is asked for when."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchembed.step.batches.reading_thread import ReadingThread


def read(batches: Iterator[Any]) -> Any:
    return next(batches)


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    calls=st.lists(st.booleans(), max_size=30),
    num_ahead=st.integers(0, 3),
)
def test_batches_of_all_iterators_come_once_and_in_order(
    sizes: list[int], calls: list[bool], num_ahead: int
) -> None:
    """True asks for a batch, False goes over to the next iterator."""
    thread = ReadingThread(read, num_ahead)
    iterators = [iter([(number, k) for k in range(size)]) for number, size in enumerate(sizes)]
    waiting = iter(iterators)
    current = next(waiting)
    given = []
    for asks in calls:
        thread.follow(current)
        if not asks:
            current = next(waiting, current)
            continue
        try:
            given.append(next(thread))
        except StopIteration:
            assert next(current, None) is None
    thread.close()
    assert given == sorted(given)
    for number in range(len(sizes)):
        taken = [k for n, k in given if n == number]
        assert taken == list(range(len(taken)))
    # Of an iterator that was left, nothing that was read is lost once a later one's batch came.
    if given:
        last = given[-1][0]
        for number, iterator in enumerate(iterators[:last]):
            taken = sum(n == number for n, _ in given)
            assert taken + len(list(iterator)) == sizes[number]


def test_what_was_read_can_be_dropped() -> None:
    thread, batches = ReadingThread(read, 2), iter(range(8))
    thread.follow(batches)
    assert next(thread) == 0
    thread.drop()
    with pytest.raises(StopIteration):
        next(thread)
    # The thread reads no more of it, so the rest may be read elsewhere, and by it again.
    assert next(batches) == 3
    thread.follow(batches)
    assert list(thread) == [4, 5, 6, 7]
    thread.close()


def test_an_error_comes_in_its_turn_and_what_follows_is_read() -> None:
    def batches() -> Iterator[int]:
        yield from range(4)

    def read_but_two(source: Iterator[int]) -> int:
        batch = next(source)
        if batch == 2:
            raise OSError("no such file")
        return batch

    thread = ReadingThread(read_but_two, num_ahead=3)
    thread.follow(batches())
    assert [next(thread), next(thread)] == [0, 1]
    with pytest.raises(OSError, match="no such file"):
        next(thread)
    assert next(thread) == 3
    with pytest.raises(StopIteration):
        next(thread)
    thread.close()


def test_reading_is_ahead_and_in_another_thread() -> None:
    read_in: list[tuple[int, threading.Thread]] = []
    third_is_read = threading.Event()

    def batches() -> Iterator[int]:
        for number in range(10):
            read_in.append((number, threading.current_thread()))
            if number == 2:
                third_is_read.set()
            yield number

    thread = ReadingThread(read, num_ahead=2)
    thread.follow(batches())
    assert next(thread) == 0
    assert third_is_read.wait(60)
    assert [number for number, _ in read_in] == [0, 1, 2]
    assert threading.main_thread() not in [where for _, where in read_in]
    thread.close()


@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_whether_batches_are_left(count: int) -> None:
    thread = ReadingThread(read, num_ahead=1)
    thread.follow(iter([0, 1]))
    assert next(thread) == 0
    # Some of one iterator, and some of the next.
    assert thread.has(1) and not thread.has(2)
    thread.follow(iter([2, 3, 4, 5]))
    assert thread.has(count) == (count <= 5)
    assert list(thread) == [1, 2, 3, 4, 5]
    assert not thread.has(1)
    thread.close()


def test_closing_loses_no_batch() -> None:
    thread = ReadingThread(read, num_ahead=2)
    thread.follow(iter(range(6)))
    assert next(thread) == 0
    thread.close()
    thread.close()
    assert list(thread) == [1, 2, 3, 4, 5]
    thread.close()


def test_a_thread_that_was_left_behind_reads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchembed.step.batches.reading_thread._CLOSE_SECONDS", 0.0)
    may_go_on, two_read, reading = threading.Event(), threading.Event(), threading.Lock()

    def batches() -> Iterator[int]:
        yield 0
        may_go_on.wait()
        yield from range(1, 6)

    def read_alone(source: Iterator[int]) -> int:
        if not reading.acquire(blocking=False):
            two_read.set()
        batch = next(source)
        reading.release()
        return batch

    thread = ReadingThread(read_alone, num_ahead=2)
    thread.follow(batches())
    assert next(thread) == 0
    thread.close()
    thread._read_ahead(3)
    assert not two_read.wait(0.2)
    may_go_on.set()
    assert list(thread) == [1, 2, 3, 4, 5]
    thread.close()
