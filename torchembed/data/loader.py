"""A loader whose threads keep batches ready ahead of the consumer."""

import collections
import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import torch

from torchembed.data.batch import Batch, as_batch
from torchembed.data.batch_memory import page_locked
from torchembed.data.source import BatchSource, BatchTask, Portion

_NUM_HELD = 4
"""Batches that a pipeline may hold before they are trained, with one to spare."""


class Announcements(Protocol):
    """Is told of batches before they are asked for."""

    def announce(self, batch: Batch) -> int:
        """A batch was made; the number is greater than those before."""
        ...

    def retire(self, number: int) -> None:
        """The batch of a number, and those before it, were trained, or will not be."""
        ...


class BackgroundLoader:
    """Iterates over ``source`` with threads that keep a few batches ready, in the source's order.

    One thread draws tasks from the source (reads, decompresses), in order, and ``num_threads``
    build batches of them. What they raise is raised again at the consumer, after the batches before
    it. Threads end with the iteration, when the iterator or the loader is closed, and when another
    iteration starts; closing waits for what a thread is doing at that moment.

    Args:
        source: a :class:`~torchembed.data.source.BatchSource`, or an iterable of what
            :func:`~torchembed.data.batch.as_batch` takes; it is iterated in another thread.
        pin_memory: whether batches lie in page-locked memory; None means where CUDA is there.
        num_ahead: most batches made and not yet consumed.
        num_threads: threads that build batches; more than one serve a ``BatchSource`` alone.
        keys: for ``as_batch``.
        announce: is told of each batch once it is made, in order, by the thread that iterates: a
            :class:`~torchembed.training.DiskReadAhead` has its rows read from the disk.
    """

    def __init__(
        self,
        source: Iterable[object],
        *,
        pin_memory: bool | None = None,
        num_ahead: int = 4,
        num_threads: int = 1,
        keys: Sequence[str] | None = None,
        announce: Announcements | None = None,
    ) -> None:
        if not (announce is None or callable(getattr(announce, "announce", None))):
            raise TypeError(f"announce must be a DiskReadAhead or None, got {announce!r}")
        for name, count in (("num_ahead", num_ahead), ("num_threads", num_threads)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        self.source, self.keys, self._announcements = source, keys, announce
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.num_ahead, self.num_threads = num_ahead, num_threads
        self.stall_seconds = 0.0
        """Seconds for which the consumer has waited for batches, over all iterations."""
        # Weak, so that an iterator that its consumer drops is closed at once.
        self._running: weakref.ref[Generator[Batch, None, None]] | None = None

    def __len__(self) -> int:
        if not isinstance(self.source, Sized):
            raise TypeError(f"{type(self.source).__name__} does not know its number of batches")
        return len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        return self.begin()

    def begin(self, after: Sequence[Portion] = ()) -> Iterator[Batch]:
        """The batches of a ``BatchSource`` that are left after ``after``, as its ``tasks`` says."""
        self.close()
        running = self._iterate(after)
        self._running = weakref.ref(running)
        return running

    def close(self) -> None:
        """End the iteration under way, if any, and its threads."""
        running = None if self._running is None else self._running()
        if running is not None:
            running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tasks(self, after: Sequence[Portion]) -> Iterator[BatchTask]:
        if isinstance(self.source, BatchSource):
            return self.source.tasks(after)
        return (partial(as_batch, item, self.keys) for item in self.source)

    def _iterate(self, after: Sequence[Portion]) -> Generator[Batch, None, None]:
        # A new thread's current device is 0: pinning there would open a context on it for every
        # rank.
        set_device = (
            partial(torch.cuda.set_device, torch.cuda.current_device())
            if self.pin_memory
            else lambda: None
        )
        builders = ThreadPoolExecutor(self.num_threads, "batch-builder", set_device)
        slots = threading.Semaphore(self.num_ahead)
        stopping = threading.Event()
        results: queue.SimpleQueue[Future[Batch] | None] = queue.SimpleQueue()

        def feed() -> None:
            try:
                set_device()
                for task in self._tasks(after):
                    slots.acquire()
                    if stopping.is_set():
                        return
                    results.put(builders.submit(self._build, task))
                results.put(None)
            except BaseException as error:  # noqa: BLE001 - raised again at the consumer
                failed: Future[Batch] = Future()
                failed.set_exception(error)
                results.put(failed)

        feeder = threading.Thread(target=feed, name="batch-feeder", daemon=True)
        feeder.start()
        ready = _ReadyBatches(results, self._announcements)
        try:
            while True:
                start = time.perf_counter()
                batch = ready.take()
                self.stall_seconds += time.perf_counter() - start
                if batch is None:
                    return
                slots.release()
                yield batch
        finally:
            ready.retire()
            stopping.set()
            slots.release()
            feeder.join()
            builders.shutdown(cancel_futures=True)

    def _build(self, task: BatchTask) -> Batch:
        with page_locked(is_wanted=self.pin_memory):
            batch = task()
        return batch.pin_memory() if self.pin_memory else batch


class _ReadyBatches:
    """Batches that threads make, in order, and that are announced once they are made."""

    def __init__(
        self,
        results: "queue.SimpleQueue[Future[Batch] | None]",
        announcements: Announcements | None,
    ) -> None:
        self._results, self._announcements = results, announcements
        self._waiting: collections.deque[Future[Batch] | None] = collections.deque()
        """Taken from ``results``; the first of them were announced."""
        self._numbers: collections.deque[int] = collections.deque()
        """Numbers of the announced batches, from the oldest that is not retired on."""
        self._num_announced = 0
        """How many of the waiting batches were announced."""

    def take(self) -> Batch | None:
        """The next batch, None after the last; waits for it, and raises what making it raised."""
        if self._announcements is None:
            result = self._results.get()
            return None if result is None else result.result()
        if not self._waiting:
            self._waiting.append(self._results.get())
        first = self._waiting[0]
        if first is not None:
            first.exception()
        while not self._results.empty():
            self._waiting.append(self._results.get())
        for future in list(self._waiting)[self._num_announced :]:
            if future is None or not future.done() or future.exception() is not None:
                break
            self._numbers.append(self._announcements.announce(future.result()))
            self._num_announced += 1
        self._waiting.popleft()
        if first is None:
            return None
        batch = first.result()
        self._num_announced -= 1
        if len(self._numbers) > self._num_announced + _NUM_HELD:
            self._announcements.retire(self._numbers.popleft())
        return batch

    def retire(self) -> None:
        """Retire all that was announced."""
        if self._announcements is not None and self._numbers:
            self._announcements.retire(self._numbers[-1])
