"""Integers that ranks show each other in shared memory: minima, rings that go round, and ends."""

import errno
import gc
import multiprocessing
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_on_ranks
from torchembed.core import ranks
from torchembed.core.ranks import minimum, node_numbers
from torchembed.core.ranks.node_numbers import MOST_PENDING, NodeNumbers, file_bytes, make_file

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
MOST_NUMBERS = 4
GREATEST, LEAST = 2**63 - 1, -(2**63)


@pytest.fixture
def path() -> Iterator[Path]:
    made = make_file(2, MOST_NUMBERS)
    assert made is not None
    yield made
    made.unlink()


@pytest.fixture
def in_process() -> Iterator[Callable[..., Any]]:
    """Starts a function of another rank in a process of its own, and waits until it says that it
    has begun."""
    context, started = multiprocessing.get_context("fork"), []

    def start(function: Callable[[Callable[[], object]], object]) -> None:
        begun = context.Event()
        started.append(context.Process(target=function, args=(begun.set,), daemon=True))
        started[-1].start()
        assert begun.wait(60.0)

    yield start
    for process in started:
        process.kill()
        process.join()


def opened(path: Path, rank: int, timeout_seconds: float = 60.0, num_ranks: int = 2) -> NodeNumbers:
    return NodeNumbers(path, rank, num_ranks, MOST_NUMBERS, timeout_seconds)


def numbers_of(rank: int, number: int) -> list[int]:
    return [rank + number, -rank, GREATEST - rank, LEAST + number * rank]


def read_late(num_pending: int) -> list[tuple[int, ...]]:
    """The results of a rank that waits for none before it has started ``num_pending``, and then in
    another order than the first rank."""
    rank = dist.get_rank()
    results = [ranks.start_minimum(*numbers_of(rank, n)) for n in range(num_pending)]
    order = range(num_pending) if rank == 0 else reversed(range(num_pending))
    for number in order:
        assert results[number]() is results[number]()
    return [result() for result in results]


def in_threads(num_results: int) -> list[tuple[int, ...]]:
    """Results that other threads than the one that started them wait for."""
    rank, found = dist.get_rank(), {}
    for number in range(num_results):
        result = ranks.start_minimum(*numbers_of(rank, number))

        def wait(number: int = number, result: Any = result) -> None:
            found[number] = result()

        thread = threading.Thread(target=wait)
        thread.start()
        if number % 3 == rank:
            time.sleep(1e-3)
        thread.join()
    return [found[number] for number in range(num_results)]


def without_shared_memory(num_results: int) -> list[tuple[int, ...]]:
    """Results by the process group."""
    minimum._of_node.clear()
    if dist.get_rank() == 0:
        minimum.make_file = lambda num_ranks, most_numbers: None
    found = [ranks.start_minimum(*numbers_of(dist.get_rank(), n))() for n in range(num_results)]
    assert list(minimum._of_node.values()) == [None]
    assert ranks.any_rank_each(dist.get_rank() == 1, False, True) == [True, False, True]
    return found


def on_another_node(num_results: int) -> list[tuple[int, ...]]:
    """Results where the last rank does not find the file."""
    minimum._of_node.clear()
    if dist.get_rank() == dist.get_world_size() - 1:
        minimum._open = lambda *arguments: None
    found = [ranks.start_minimum(*numbers_of(dist.get_rank(), n))() for n in range(num_results)]
    assert list(minimum._of_node.values()) == [None]
    return found


def of_all_ways() -> dict[str, Any]:
    before = set(node_numbers._FOLDER.glob("torchembed-*"))
    shared = {
        "late": read_late(3 * MOST_PENDING),
        "in threads": in_threads(20),
        "is shared": all(isinstance(made, NodeNumbers) for made in minimum._of_node.values()),
    }
    left = set(node_numbers._FOLDER.glob("torchembed-*")) - before
    mapped = Path("/proc/self/maps").read_text()
    return {
        **shared,
        "left": sorted(path.name for path in left if path.name in mapped),
        "by the group": without_shared_memory(5),
        "on another node": on_another_node(5),
    }


def test_all_ranks_find_the_least_of_all() -> None:
    num_ranks = 3
    for found in run_on_ranks(num_ranks, of_all_ways):
        assert found.pop("is shared") is True
        assert found.pop("left") == []
        for results in found.values():
            assert results == [
                tuple(map(min, *(numbers_of(rank, number) for rank in range(num_ranks))))
                for number in range(len(results))
            ]


def test_a_rank_that_starts_many_waits_for_the_others(
    path: Path, in_process: Callable[..., Any]
) -> None:
    """A ring is not written over before all have read it."""
    mine = opened(path, 0, timeout_seconds=0.3)

    def other(begin: Callable[[], object]) -> None:
        kept = opened(path, 1)
        kept.start([0])
        begin()
        time.sleep(60.0)

    in_process(other)
    assert mine.start([1])() == (0,)
    for _ in range(MOST_PENDING - 1):
        mine.start([1])
    mine.start([1])  # the first of them was waited for
    with pytest.raises(TimeoutError, match=r"^rank 1 did not come within 0\.3 s"):
        mine.start([1])


def test_a_rank_that_ends_is_named(path: Path, in_process: Callable[..., Any]) -> None:
    mine = opened(path, 0)

    def other(begin: Callable[[], object]) -> None:
        kept = opened(path, 1)
        kept.start([3, 4])
        begin()
        os._exit(1)

    in_process(other)
    first, second = mine.start([5, 2]), mine.start([5, 2])
    assert first() == (3, 2)  # given before it ended
    start = time.monotonic()
    with pytest.raises(
        ConnectionError, match=r"^rank 1 has ended, and this rank waits for it; see its output$"
    ):
        second()
    assert time.monotonic() - start < 30.0


def test_a_rank_that_ends_is_named_while_others_wait_for_it(
    in_process: Callable[..., Any],
) -> None:
    made = make_file(3, MOST_NUMBERS)
    assert made is not None
    mine = opened(made, 0, num_ranks=3)

    def waits(begin: Callable[[], object]) -> None:
        kept = opened(made, 1, num_ranks=3)
        begin()
        time.sleep(60.0)
        del kept

    def ends(begin: Callable[[], object]) -> None:
        kept = opened(made, 2, num_ranks=3)
        begin()
        time.sleep(0.5)
        del kept
        os._exit(0)

    in_process(waits)
    in_process(ends)
    made.unlink()
    with pytest.raises(ConnectionError, match=r"^rank 2 has ended, and this rank waits for it; "):
        mine.start([1])()


def test_a_rank_that_does_not_come_is_named(path: Path, in_process: Callable[..., Any]) -> None:
    mine = opened(path, 0, timeout_seconds=0.4)

    def other(begin: Callable[[], object]) -> None:
        kept = opened(path, 1)
        begin()
        time.sleep(60.0)
        del kept

    in_process(other)
    with pytest.raises(
        TimeoutError,
        match=re.escape(
            "rank 1 did not come within 0.4 s to where this rank waits for it; every rank must "
            "read equally many batches and make the same calls: look for one that failed, or give "
            "init_process_group a longer timeout"
        ),
    ):
        mine.start([1])()


def test_a_record_that_is_seen_in_part_is_read_again(path: Path) -> None:
    mine = opened(path, 0, timeout_seconds=0.05)
    mine._has_ended = lambda rank: False  # type: ignore[method-assign]
    result, place = mine.start([-1]), mine._place(1, 1)
    form = struct.Struct("2q")
    whole = form.pack(1, -2) + node_numbers._check(form.pack(1, -2))
    of_another = form.pack(2, -2) + node_numbers._check(form.pack(2, -2))
    parts = [form.pack(1, -1) + whole[16:], form.pack(2, -2) + whole[16:], whole[:16] + bytes(8)]
    for record in (*parts, of_another):
        mine._memory[place : place + len(record)] = record
        with pytest.raises(TimeoutError):
            result()
    mine._memory[place : place + len(whole)] = whole
    assert result() == (-2,)


def test_a_waiting_thread_gets_what_another_has_found(path: Path) -> None:
    """Its records may have been replaced by then."""
    mine = opened(path, 0)
    mine._has_ended = lambda rank: False  # type: ignore[method-assign]
    result, found = mine.start([3]), []
    waiting = threading.Thread(target=lambda: found.append(result()))
    waiting.start()
    result.found = (2,)
    waiting.join(30.0)
    assert found == [(2,)]


def test_the_memory_goes_with_its_last_user(path: Path) -> None:
    """Without the collector of cycles."""
    mine = opened(path, 0)
    files = len(os.listdir("/proc/self/fd"))
    results = [mine.start([n]) for n in range(3)]
    gc.disable()
    try:
        del mine
        assert len(os.listdir("/proc/self/fd")) == files
        results.clear()
        assert len(os.listdir("/proc/self/fd")) == files - 2  # the file, and its map
    finally:
        gc.enable()
    opened(path, 0)


def ranks_of_several_nodes() -> list[object]:
    """Boot ids that differ, or that a rank does not know."""
    found: list[object] = []
    for name in (f"of rank {dist.get_rank()}", "none" if dist.get_rank() else "of all"):
        minimum._of_node.clear()
        minimum._BOOT_ID = Path(tempfile.gettempdir()) / f"boot-id-{os.getpid()}"
        if name != "none":
            minimum._BOOT_ID.write_text(name)
        found += [ranks.any_rank(dist.get_rank() == 1), list(minimum._of_node.values())]
        minimum._BOOT_ID.unlink(missing_ok=True)
    return found


def test_no_file_is_made_for_several_nodes() -> None:
    assert run_on_ranks(2, ranks_of_several_nodes) == [[True, [None]] * 2] * 2


def test_too_many_numbers_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"^numbers must be at most 4, got 5 of them$"):
        opened(path, 0).start(range(5))


def test_no_file_is_made_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(node_numbers, "_FOLDER", tmp_path / "none")
    assert make_file(2, 4) is None
    monkeypatch.setattr(node_numbers, "_FOLDER", tmp_path)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert make_file(2, 4) is None
    assert not list(tmp_path.iterdir())
    made = make_file(2, 4)
    assert made is not None
    assert made.stat().st_size == file_bytes(2, 4) == 2 * 2 * MOST_PENDING * (4 + 2) * 8


def test_a_missing_file_is_of_another_node(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "none", 0)
    assert minimum._open(tmp_path / "none", 2, 4) is None
