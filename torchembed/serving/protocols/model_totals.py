"""Totals of the requests that each version of a model was asked."""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

DURATION_BOUNDS_SECONDS = tuple(
    digit * 10.0**power for power in range(-4, 1) for digit in (1, 2, 5)
)
"""Upper bounds of the buckets of a request's time."""

_MAX_VERSIONS = 16


class RequestRecord(NamedTuple):
    """A request that a model was asked. Times are in seconds."""

    model: str
    version: str
    succeeded: bool
    num_samples: int
    num_default_rows: int
    queue_seconds: float
    input_seconds: float
    infer_seconds: float
    output_seconds: float


class ExecutionTotals(NamedTuple):
    """How often a version of a model that batches its requests ran, and how they waited for it."""

    model: str
    version: str
    num_executions: int
    num_pending: int
    """Requests that wait now."""
    queue_seconds: float
    """Waits of all requests; their sum is taken off the time in which the model ran."""


@dataclass
class ModelTotals:
    """Totals of a version of a model."""

    num_succeeded: int = 0
    num_failed: int = 0
    num_samples: int = 0
    num_executions: int = 0
    num_pending: int = 0
    num_default_rows: int = 0
    request_seconds: float = 0.0
    failed_seconds: float = 0.0
    queue_seconds: float = 0.0
    input_seconds: float = 0.0
    infer_seconds: float = 0.0
    output_seconds: float = 0.0
    last_request_milliseconds: int = 0
    """Since 1970, of the last request that was answered."""
    duration_counts: list[int] = field(
        default_factory=lambda: [0] * (len(DURATION_BOUNDS_SECONDS) + 1)
    )


class TotalsByModel:
    """Totals by model and version. Of each model the versions that were asked last are held, 16 at
    most, since a server that is updated has ever more of them."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[ExecutionTotals]]] = []
        self._totals: dict[str, dict[str, ModelTotals]] = {}
        self._lock = threading.Lock()

    def record(self, request: RequestRecord) -> None:
        """Add a request."""
        duration = (
            request.queue_seconds
            + request.input_seconds
            + request.infer_seconds
            + request.output_seconds
        )
        bucket = bisect_left(DURATION_BOUNDS_SECONDS, duration)
        with self._lock:
            totals = self._of(request.model, request.version)
            if not request.succeeded:
                totals.num_failed += 1
                totals.failed_seconds += duration
                return
            totals.num_succeeded += 1
            totals.num_executions += 1
            totals.num_samples += request.num_samples
            totals.num_default_rows += request.num_default_rows
            totals.request_seconds += duration
            totals.queue_seconds += request.queue_seconds
            totals.input_seconds += request.input_seconds
            totals.infer_seconds += request.infer_seconds
            totals.output_seconds += request.output_seconds
            totals.last_request_milliseconds = time.time_ns() // 1_000_000
            totals.duration_counts[bucket] += 1

    def _of(self, model: str, version: str) -> ModelTotals:
        versions = self._totals.setdefault(model, {})
        totals = versions.get(version)
        if totals is None:
            if len(versions) == _MAX_VERSIONS:
                del versions[min(versions, key=lambda v: versions[v].last_request_milliseconds)]
            totals = versions[version] = ModelTotals()
        return totals

    def read(self) -> dict[tuple[str, str], ModelTotals]:
        """A copy, with the executions and waits of models that batch their requests."""
        with self._lock:
            totals = {
                (model, version): replace(total, duration_counts=list(total.duration_counts))
                for model, versions in self._totals.items()
                for version, total in versions.items()
            }
        for source in self.sources:
            for execution in source():
                total = totals.get((execution.model, execution.version))
                if total is None:
                    continue
                total.num_executions = execution.num_executions
                total.num_pending = execution.num_pending
                total.queue_seconds += execution.queue_seconds
                total.infer_seconds = max(0.0, total.infer_seconds - execution.queue_seconds)
        return totals
