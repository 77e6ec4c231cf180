"""What a server counts, for Prometheus and for the protocol's statistics."""

import enum
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from torchembed.serving.protocols.model_totals import (
    DURATION_BOUNDS_SECONDS,
    ExecutionTotals,
    ModelTotals,
    RequestRecord,
    TotalsByModel,
)

_logger = logging.getLogger("torchembed.serving")


class MetricKind(enum.Enum):
    """How a metric changes; values are Prometheus' names."""

    COUNTER = "counter"
    """Only grows; its name ends in ``_total``."""
    GAUGE = "gauge"


class MetricTotal(NamedTuple):
    """A number of another part of the server, as it stands."""

    name: str
    kind: MetricKind
    help: str
    labels: Mapping[str, str]
    """The same names of labels for all totals of a name."""
    value: float


class HistogramTotal(NamedTuple):
    """A distribution of another part of the server, as it stands."""

    name: str
    help: str
    labels: Mapping[str, str]
    upper_bounds: tuple[float, ...]
    """Ascending, without infinity."""
    counts: tuple[int, ...]
    """Of what is within each bound and above the one before; one more, for what is above all."""
    sum: float


MetricSource = Callable[[], Iterable[MetricTotal | HistogramTotal]]
"""Gives totals of a part of the server whenever they are read; any thread calls it."""


@dataclass(frozen=True)
class _Nv:
    name: str
    help: str
    value: Callable[[ModelTotals], float]


_NV = (
    _Nv("request_success", "Requests that were answered", lambda t: t.num_succeeded),
    _Nv("request_failure", "Requests that were not answered", lambda t: t.num_failed),
    _Nv("count", "Samples that were inferred", lambda t: t.num_samples),
    _Nv("exec_count", "Executions of the model, each of a batch", lambda t: t.num_executions),
    _Nv(
        "request_duration_us",
        "Microseconds from a request's arrival to its answer",
        lambda t: t.request_seconds * 1e6,
    ),
    _Nv(
        "queue_duration_us",
        "Microseconds that requests waited",
        lambda t: t.queue_seconds * 1e6,
    ),
    _Nv(
        "compute_input_duration_us",
        "Microseconds in which inputs were read",
        lambda t: t.input_seconds * 1e6,
    ),
    _Nv(
        "compute_infer_duration_us",
        "Microseconds in which the model ran",
        lambda t: t.infer_seconds * 1e6,
    ),
    _Nv(
        "compute_output_duration_us",
        "Microseconds in which answers were written",
        lambda t: t.output_seconds * 1e6,
    ),
)


class ServerMetrics(Collector):
    """What all protocols of a server count, and what its other parts do, in one place."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._totals = TotalsByModel()
        self._sources: list[MetricSource] = []
        self._num_refused: dict[tuple[str, str], int] = {}
        # Both from the start: a gauge that comes with the first request looks like one that failed.
        self._num_in_progress = {"http": 0, "grpc": 0}
        self._num_failed_reads = 0
        self._lock = threading.Lock()

    def add_source(self, source: MetricSource) -> None:
        """Have totals of another part of the server read whenever metrics are."""
        self._sources.append(source)

    def add_execution_source(self, source: Callable[[], Iterable[ExecutionTotals]]) -> None:
        """Have executions of models whose requests are batched read whenever metrics are."""
        self._totals.sources.append(source)

    def record(self, request: RequestRecord) -> None:
        """Count a request that a model was asked."""
        self._totals.record(request)

    def refused(self, protocol: str, reason: str) -> None:
        """Count a request that no model was asked."""
        with self._lock:
            key = (protocol, reason)
            self._num_refused[key] = self._num_refused.get(key, 0) + 1

    def in_progress(self, protocol: str, change: int) -> None:
        """Count requests over ``"http"`` or ``"grpc"`` that begin (1) and end (-1)."""
        with self._lock:
            self._num_in_progress[protocol] += change

    def totals(self) -> dict[tuple[str, str], ModelTotals]:
        """The totals of each model and version that was asked."""
        return self._totals.read()

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics in the text format that ``accept`` prefers, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # of a version there that is no number
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        totals = self.totals()
        # Not "counter": the client would add _total to Triton's names.
        for nv in _NV:
            family = Metric(f"nv_inference_{nv.name}", nv.help, "unknown")
            for (model, version), total in totals.items():
                family.add_sample(family.name, _labels(model, version), nv.value(total))
            yield family
        pending = Metric("nv_inference_pending_request_count", "Requests that wait", "gauge")
        defaults = Metric(
            "torchembed_default_rows", "Ids of requests that had no row to hand", "counter"
        )
        seconds = HistogramMetricFamily(
            "torchembed_request_duration_seconds",
            "From a request's arrival to its answer",
            labels=("model", "version"),
        )
        for (model, version), total in totals.items():
            labels = _labels(model, version)
            pending.add_sample(pending.name, labels, total.num_pending)
            defaults.add_sample(f"{defaults.name}_total", labels, total.num_default_rows)
            seconds.add_metric(
                (model, version),
                _cumulative(DURATION_BOUNDS_SECONDS, total.duration_counts),
                total.request_seconds,
            )
        yield from (pending, defaults, seconds)
        yield from self._own()
        yield from self._of_sources()

    def _own(self) -> Iterator[Metric]:
        with self._lock:
            num_refused = dict(self._num_refused)
            num_in_progress = dict(self._num_in_progress)
        refused = Metric(
            "torchembed_refused_requests", "Requests that no model was asked", "counter"
        )
        for (protocol, reason), count in num_refused.items():
            labels = {"protocol": protocol, "reason": reason}
            refused.add_sample(f"{refused.name}_total", labels, count)
        in_progress = Metric(
            "torchembed_requests_in_progress", "Requests that are being answered", "gauge"
        )
        for protocol, count in num_in_progress.items():
            in_progress.add_sample(in_progress.name, {"protocol": protocol}, count)
        yield from (refused, in_progress)

    def _of_sources(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for source in self._sources:
            try:
                for total in source():
                    _add(families, total)
            except Exception:
                self._num_failed_reads += 1
                _logger.exception("metrics of a part of the server could not be read")
        yield from families.values()
        failed = Metric(
            "torchembed_failed_metric_reads", "Parts whose metrics could not be read", "counter"
        )
        failed.add_sample(f"{failed.name}_total", {}, self._num_failed_reads)
        yield failed


def _labels(model: str, version: str) -> dict[str, str]:
    return {"model": model, "version": version}


def _cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    names = [str(bound) for bound in bounds] + ["+Inf"]
    total, buckets = 0, []
    for name, count in zip(names, counts, strict=True):
        total += count
        buckets.append((name, float(total)))
    return buckets


def _add(families: dict[str, Metric], total: MetricTotal | HistogramTotal) -> None:
    if isinstance(total, HistogramTotal):
        family = families.setdefault(total.name, Metric(total.name, total.help, "histogram"))
        buckets = _cumulative(total.upper_bounds, total.counts)
        for bound, count in buckets:
            family.add_sample(f"{total.name}_bucket", {**total.labels, "le": bound}, count)
        family.add_sample(f"{total.name}_count", dict(total.labels), buckets[-1][1])
        family.add_sample(f"{total.name}_sum", dict(total.labels), total.sum)
        return
    if total.kind is MetricKind.COUNTER and not total.name.endswith("_total"):
        raise ValueError(f"a counter's name must end in _total, got {total.name}")
    name = total.name
    if total.kind is MetricKind.COUNTER:  # to whose family's name the text adds _total
        name = name.removesuffix("_total")
    family = families.setdefault(name, Metric(name, total.help, total.kind.value))
    family.add_sample(total.name, dict(total.labels), total.value)
