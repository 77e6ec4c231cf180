"""A thread that does one thing after the other."""

import gc
import threading

import pytest

from torchembed.step.batches.worker import Worker


def test_tasks_run_in_order_on_one_other_thread() -> None:
    worker, seen = Worker("a worker"), []

    def task(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number * number

    futures = [worker.submit(lambda number=number: task(number)) for number in range(5)]
    assert [future.result() for future in futures] == [0, 1, 4, 9, 16]
    assert seen == [(number, "a worker") for number in range(5)]


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    worker = Worker("a worker")

    def fail() -> None:
        raise OSError("the wire is cut")

    failed, later = worker.submit(fail), worker.submit(lambda: 7)
    with pytest.raises(OSError, match="the wire is cut"):
        failed.result()
    assert later.result() == 7


def test_closing_waits_for_what_was_given() -> None:
    worker, gate = Worker("a worker"), threading.Event()
    done = worker.submit(gate.wait)
    worker.close(0.0)
    assert not done.done()
    gate.set()
    worker.close(60.0)
    assert done.result()
    assert not worker._thread.is_alive()


def test_the_thread_goes_with_its_worker() -> None:
    worker = Worker("a worker")
    thread = worker._thread
    del worker
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()
