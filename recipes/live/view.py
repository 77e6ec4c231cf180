"""A view of a server that follows a trainer: how fresh, how fast, and how many ids were cached."""

import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_AGES = "torchembed_update_age_seconds_bucket"
_ROWS = "torchembed_updated_rows_total"
_HITS, _MISSES = "torchembed_cache_hits_total", "torchembed_cache_misses_total"


class Totals(NamedTuple):
    """What the metrics of a server say."""

    ages: Mapping[float, float]
    """Updates that were at most so many seconds old as they were applied."""
    num_rows: float
    """Rows of updates."""
    hits: float
    misses: float

    @classmethod
    def read(cls, address: str) -> "Totals":
        """The totals of now."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            text = response.read().decode()
        ages: dict[float, float] = {}
        sums = dict.fromkeys((_ROWS, _HITS, _MISSES), 0.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _AGES:
                    bound = float(sample.labels["le"])
                    ages[bound] = ages.get(bound, 0.0) + sample.value
                elif sample.name in sums:
                    sums[sample.name] += sample.value
        return cls(ages, sums[_ROWS], sums[_HITS], sums[_MISSES])


class LivePoint(NamedTuple):
    """The server in some seconds."""

    seconds: float
    """Since the beginning."""
    version: str
    """Of the dense part that answered last."""
    requests_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    rows_per_second: float
    """Rows of updates."""
    freshness_seconds: float | None
    """99 % of the updates were younger as lookups saw them; None where there was none."""
    hit_rate: float
    num_failed: int

    def __str__(self) -> str:
        fresh = "-" if self.freshness_seconds is None else f"{self.freshness_seconds:g} s"
        return (
            f"{self.seconds:5.0f} s  version {self.version:>6}  "
            f"{self.requests_per_second:6.0f} requests/s  "
            f"p50 {self.p50_milliseconds:6.2f} ms  p99 {self.p99_milliseconds:6.2f} ms  "
            f"{self.rows_per_second:8.0f} new rows/s  fresh within {fresh}  "
            f"{self.hit_rate:6.1%} cached  {self.num_failed} failed"
        )


def freshness(before: Totals, after: Totals, share: float = 0.99) -> float | None:
    """The bound that ``share`` of the updates in between were not older than; None where there was
    none."""
    counts = {bound: n - before.ages.get(bound, 0.0) for bound, n in after.ages.items()}
    whole = counts.get(float("inf"), 0.0)
    if not whole:
        return None
    return next(bound for bound in sorted(counts) if counts[bound] >= share * whole)


def hit_rate(before: Totals, after: Totals) -> float:
    """The part of the ids in between that were cached."""
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / max(1.0, hits + misses)


def plot(points: Sequence[LivePoint], path: Path) -> None:
    """Draw all points into a PNG at ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    fresh_axes, latency_axes, hit_axes = figure.subplots(3, 1, sharex=True)
    figure.suptitle("A server that follows its trainer")
    seconds = [point.seconds for point in points]
    updated = [point for point in points if point.freshness_seconds is not None]
    fresh_axes.step(
        [point.seconds for point in updated],
        [point.freshness_seconds for point in updated],
        where="post",
    )
    fresh_axes.set_ylabel("update to lookup, p99 (s)")
    fresh_axes.set_yscale("log")
    for name in ("p50", "p99"):
        values = [getattr(point, f"{name}_milliseconds") for point in points]
        latency_axes.plot(seconds, values, label=name)
    latency_axes.set_ylabel("request (ms)")
    latency_axes.legend()
    hit_axes.plot(seconds, [point.hit_rate for point in points])
    hit_axes.set_ylabel("ids that were cached")
    hit_axes.set_ylim(0, 1.02)
    hit_axes.set_xlabel("seconds")
    figure.savefig(path)
