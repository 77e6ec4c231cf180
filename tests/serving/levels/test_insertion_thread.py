"""The thread that inserts rows behind lookups."""

import logging
import threading

import pytest

from torchembed.serving.levels.insertion_thread import InsertionThread


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyError, TypeError, MemoryError])
def test_it_goes_on_whatever_was_raised(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[int] = []
    failures: list[None] = []

    def handle(number: int) -> None:
        if number == 1:
            raise error("no")
        handled.append(number)

    thread = InsertionThread(handle, lambda: failures.append(None), 8)
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            assert thread.offer(number)
        thread.wait()
    assert handled == [0, 2] and len(failures) == 1
    assert "missing rows were not inserted" in caplog.text
    thread.close()
    thread.close()


def test_what_finds_no_room_is_refused() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    handled: list[int] = []

    def handle(number: int) -> None:
        begun.set()
        assert goes_on.wait(60)
        handled.append(number)

    thread = InsertionThread(handle, lambda: None, 1)
    assert thread.offer(0)
    assert begun.wait(60)
    assert thread.offer(1)
    assert not thread.offer(2)
    goes_on.set()
    thread.close()
    assert handled == [0, 1]
