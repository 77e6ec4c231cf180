"""Requests that wait for a model, gathered and answered together."""

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from torchembed.modules.dense_part.forms import DEFAULT_ROWS
from torchembed.serving.interface import Answer, BusyError, ModelForm
from torchembed.serving.models.loaded_version import LoadedVersion
from torchembed.serving.models.request import Request, check_request, joined


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How requests are gathered.

    Raises:
        ValueError: for values that cannot be.
    """

    max_samples: int = 1024
    """The most samples of a batch; a request that has more is one on its own."""
    max_delay_seconds: float = 200e-6
    """How long a request waits for others."""
    max_waiting_requests: int = 1024
    """Further ones are refused."""
    num_instances: int = 1
    """Batches that are computed at once."""

    def __post_init__(self) -> None:
        for name in ("max_samples", "max_waiting_requests", "num_instances"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.max_delay_seconds >= 0:
            raise ValueError(
                f"max_delay_seconds must not be negative, got {self.max_delay_seconds}"
            )


_MAX_VERSIONS = 16


class BatchTotals(NamedTuple):
    """Counts of the batches that one version of a model has answered."""

    model: str
    version: str
    num_batches: int
    num_waiting: int
    """Requests that wait now."""
    queue_seconds: float
    """Waits of all requests."""


class BatchTally:
    """Counts the batches of all batchers that a model has and had, by the versions of answers; of
    these the last ones, 16 at most."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def add(self, version: str, queue_seconds: float) -> None:
        """Count a batch, whose requests waited so long together."""
        with self._lock:
            num_batches, before = self._counts.pop(version, (0, 0.0))
            # At the end, so that the first one is the one that answered the longest ago.
            self._counts[version] = num_batches + 1, before + queue_seconds
            if len(self._counts) > _MAX_VERSIONS:
                del self._counts[next(iter(self._counts))]

    def read(self) -> dict[str, tuple[int, float]]:
        """The number of batches and the seconds of each version."""
        with self._lock:
            return dict(self._counts)


@dataclasses.dataclass
class _Waiting:
    request: Request
    outputs: Sequence[str] | None
    came_at: float
    answer: Future[Answer]


class DynamicBatcher:
    """Answers for a version by batches of the requests that wait for it
    (:class:`~torchembed.serving.interface.ServedModel`).

    A request is checked before it joins others, so that one that does not fit fails alone. All
    requests of a batch are answered by one version. It is a context manager, whose end answers what
    waits; nobody may ask any more then.

    Args:
        version: that answers.
        options: how requests are gathered.
        tally: counts batches.
    """

    def __init__(self, version: LoadedVersion, options: BatchOptions, tally: BatchTally) -> None:
        self._version, self._options, self._tally = version, options, tally
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"batches of {version.form.name}", daemon=True)
            for _ in range(options.num_instances)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def form(self) -> ModelForm:
        """That of the version."""
        return self._version.form

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        """As :meth:`torchembed.serving.interface.ServedModel.answer`.

        Raises:
            BusyError: where too many requests wait, or the batcher has ended.
        """
        self._version.check_outputs(outputs)
        request = check_request(self._version.description, inputs)
        waiting = _Waiting(request, outputs, time.perf_counter(), Future())
        with self._changed:
            if self._is_closed:
                raise BusyError(f"model {self.form.name} answers no longer; ask again")
            if len(self._waiting) >= self._options.max_waiting_requests:
                raise BusyError(
                    f"model {self.form.name} has {len(self._waiting)} requests waiting, as many as "
                    "may; ask again later"
                )
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.answer.result()

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._answer(batch)
            except BaseException as error:  # noqa: BLE001 those who wait raise it
                for waiting in batch:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)

    def _next(self) -> list[_Waiting]:
        """The next batch; none where there will be no more."""
        limit = self._options.max_samples
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return []
                left = self._waiting[0].came_at + self._options.max_delay_seconds
                left -= time.perf_counter()
                num_samples = sum(waiting.request.num_samples for waiting in self._waiting)
                if left <= 0 or num_samples >= limit or self._is_closed:
                    break
                self._changed.wait(left)
            batch = [self._waiting.popleft()]
            num_samples = batch[0].request.num_samples
            while self._waiting:
                num_samples += self._waiting[0].request.num_samples
                if num_samples > limit:
                    # Another thread need not wait until this batch is answered.
                    self._changed.notify()
                    break
                batch.append(self._waiting.popleft())
            return batch

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        began = time.perf_counter()
        whole = self._version.answer_request(joined([waiting.request for waiting in batch]))
        self._tally.add(whole.version, sum(began - waiting.came_at for waiting in batch))
        first = 0
        for waiting in batch:
            end = first + waiting.request.num_samples
            parts = {name: array[first:end] for name, array in whole.outputs.items()}
            num_default = int(parts[DEFAULT_ROWS].sum())
            if waiting.outputs is not None:
                parts = {name: parts[name] for name in waiting.outputs}
            waiting.answer.set_result(Answer(parts, whole.version, num_default))
            first = end
