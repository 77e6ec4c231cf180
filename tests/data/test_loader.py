"""The background loader: order, errors, threads that end, and the time it was waited for."""

import threading
import traceback
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from torchembed.core.features import SparseFeatures
from torchembed.data import BackgroundLoader, Batch, BatchSource, Portion
from torchembed.data.batch_memory import empty, page_locked
from torchembed.data.source import BatchTask

NUM_BATCHES = 40


class Numbered(BatchSource):
    """Batch i holds i; in pairs, the task of the first waits until that of the second runs."""

    def __init__(self, *, in_pairs: bool = True, bad: int | None = None) -> None:
        super().__init__(
            keys=("a",), table_sizes=1, num_dense=1, batch_size=1, rank=0, world_size=1
        )
        self.in_pairs, self.bad = in_pairs, bad
        self.drawn = 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        for start in range(sum(p.num_batches for p in after), NUM_BATCHES, 2):
            second_runs = threading.Event()
            for number in (start, start + 1):
                self.drawn += 1
                yield partial(self._task, number, second_runs)

    def _task(self, number: int, second_runs: threading.Event) -> Batch:
        if number % 2:
            second_runs.set()
        elif self.in_pairs:
            second_runs.wait()
        if number == self.bad:
            raise RuntimeError(f"batch {number} is bad")
        return numbered(number)


def numbered(number: int) -> Batch:
    sparse = SparseFeatures(
        keys=("a",), values=torch.zeros(1, dtype=torch.int64), batch_size=1, hotness=(1,)
    )
    return Batch(torch.full((1, 1), float(number)), sparse, torch.zeros(1))


def number_of(batch: Batch) -> int:
    return int(batch.dense)


def loader_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("batch-")]


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert loader_threads() == []


@pytest.mark.parametrize("num_ahead", [2, 7, 100])
@pytest.mark.parametrize("num_threads", [2, 5])
def test_order_is_kept(num_ahead: int, num_threads: int) -> None:
    loader = BackgroundLoader(Numbered(), num_ahead=num_ahead, num_threads=num_threads)
    for _ in range(2):
        assert [number_of(batch) for batch in loader] == list(range(NUM_BATCHES))
    assert len(loader) == NUM_BATCHES


def test_any_iterable_serves() -> None:
    items = [
        (torch.full((2, 1), float(i)), torch.zeros((2, 1), dtype=torch.int64), torch.ones(2))
        for i in range(10)
    ]
    loader = BackgroundLoader((item for item in items), keys=("user",))
    got = list(loader)
    assert [int(batch.dense[0, 0]) for batch in got] == list(range(10))
    assert got[0].sparse.keys == ("user",)
    with pytest.raises(TypeError, match="generator does not know its number of batches"):
        len(loader)
    assert len(BackgroundLoader(items)) == 10


def test_errors_of_tasks_come_in_their_place_with_their_traceback() -> None:
    batches = iter(BackgroundLoader(Numbered(in_pairs=False, bad=7), num_ahead=20, num_threads=2))
    assert [number_of(next(batches)) for _ in range(7)] == list(range(7))
    with pytest.raises(RuntimeError, match="batch 7 is bad") as caught:
        next(batches)
    assert "in _task" in "".join(traceback.format_exception(caught.value))


def test_errors_of_the_source_are_raised() -> None:
    def items() -> Iterator[Batch]:
        yield numbered(0)
        raise OSError("the disk is gone")

    loader = iter(BackgroundLoader(items()))
    assert number_of(next(loader)) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)


def divide_by_zero(loader: BackgroundLoader) -> None:
    for batch in loader:
        number_of(batch) // 0


@pytest.mark.parametrize("how", ["break", "close", "with", "exception", "again"])
def test_threads_end_when_the_consumer_stops(how: str) -> None:
    source = Numbered(in_pairs=False)
    loader = BackgroundLoader(source, num_ahead=3, num_threads=2)
    if how == "break":
        for _ in loader:
            break
    elif how == "close":
        batches = iter(loader)
        next(batches)
        assert loader_threads()
        loader.close()
        loader.close()
        assert list(batches) == []
    elif how == "with":
        batches = iter(loader)
        with loader:
            next(batches)
        assert list(batches) == []
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            divide_by_zero(loader)
    else:
        first = iter(loader)
        next(first)
        assert number_of(next(iter(loader))) == 0
        with pytest.raises(StopIteration):
            next(first)
        loader.close()
    # One batch was consumed, three may wait, and one more may have been drawn; twice for "again".
    assert source.drawn <= (10 if how == "again" else 5)


def test_stalls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now, is_waiting = 0.0, threading.Event()

    def items() -> Iterator[Batch]:
        nonlocal now
        is_waiting.wait()
        now += 0.25
        yield numbered(0)

    def clock() -> float:
        before = now
        is_waiting.set()
        return before

    monkeypatch.setattr("torchembed.data.loader.time.perf_counter", clock)
    loader = BackgroundLoader(items())
    assert loader.stall_seconds == 0.0
    list(loader)
    assert loader.stall_seconds == 0.25


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="num_ahead must be at least 1, got 0"):
        BackgroundLoader([], num_ahead=0)
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        BackgroundLoader([], num_threads=0)


@pytest.mark.gpu
def test_batches_are_pinned() -> None:
    for batch in BackgroundLoader(Numbered(), num_ahead=4, num_threads=2):
        assert batch.dense.is_pinned()
        assert batch.sparse.values.is_pinned()
        assert batch.labels.is_pinned()


@pytest.mark.gpu
def test_batches_are_built_where_they_are_pinned() -> None:
    for is_wanted in (True, False):
        with page_locked(is_wanted=is_wanted):
            assert empty([3], torch.int32).is_pinned() == is_wanted
    assert not empty([3], torch.float32).is_pinned()


def test_memory_of_batches_is_plain_where_none_is_pinned() -> None:
    with page_locked(is_wanted=False):
        found = empty([2, 3], torch.float32)
    assert (found.dtype, tuple(found.shape), found.is_pinned()) == (torch.float32, (2, 3), False)
    assert empty([4], torch.int32).dtype is torch.int32
