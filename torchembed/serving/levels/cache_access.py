"""Who may read and write a cache when."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch


class CacheAccess:
    """Any number of threads reads a cache at a time, or one writes it.

    On a CPU whoever is inside has done its reading or writing when it leaves. On a GPU that has
    only been enqueued by then, so that streams wait for each other: a writer's for all reads that
    were enqueued before, and a reader's for the write that was enqueued last. The host waits for
    neither. A writer that waits goes before readers that come later.

    Neither context may be entered inside another one of the same cache.

    Args:
        devices: of the cache.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._changed = threading.Condition()
        self._num_readers = self._num_waiting_writers = 0
        self._is_written = False
        self._streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}
        """Streams that were current ones, by the number of their GPU and their handle."""
        self._reads: dict[tuple[torch.device, int], torch.cuda.Event] = {}
        """The end of the last read of each stream."""
        self._writes: dict[torch.device, torch.cuda.Event] = {}
        """The end of the last write."""

    def stream_of(self, gpu: torch.device) -> torch.cuda.Stream:
        """The current stream of a GPU of the cache: ``torch.cuda.current_stream`` without making
        an object at each call, which takes several microseconds."""
        place = gpu.index, torch._C._cuda_getCurrentRawStream(gpu.index)
        stream = self._streams.get(place)
        if stream is None:
            stream = self._streams[place] = torch.cuda.current_stream(gpu)
        return stream

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which the caller's thread, or the current streams, read."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written and not self._num_waiting_writers)
            self._num_readers += 1
        try:
            for gpu, event in self._writes.items():
                self.stream_of(gpu).wait_event(event)
            yield
        finally:
            with self._changed:
                for gpu in self._gpus:
                    stream = self.stream_of(gpu)
                    place = gpu, stream.cuda_stream
                    event = self._reads.get(place)
                    if event is None:
                        event = self._reads[place] = torch.cuda.Event()
                    event.record(stream)
                self._num_readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context in which the caller's thread, or the current streams, write."""
        with self._changed:
            self._num_waiting_writers += 1
            self._changed.wait_for(lambda: not self._is_written and not self._num_readers)
            self._num_waiting_writers -= 1
            self._is_written = True
        try:
            for (gpu, _), event in self._reads.items():
                torch.cuda.current_stream(gpu).wait_event(event)
            for gpu, event in self._writes.items():
                torch.cuda.current_stream(gpu).wait_event(event)
            yield
        finally:
            for gpu in self._gpus:
                self._writes.setdefault(gpu, torch.cuda.Event()).record(
                    torch.cuda.current_stream(gpu)
                )
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
