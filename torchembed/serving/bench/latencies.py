"""Latencies of requests, and their percentiles."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Latencies(NamedTuple):
    """A distribution of latencies, in milliseconds."""

    mean: float
    p50: float
    p99: float
    p999: float
    max: float


def percentile(ascending: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of all values do not exceed (the nearest rank).

    Args:
        ascending: at least one value.
        share: in (0, 1].
    """
    return ascending[math.ceil(share * len(ascending)) - 1]


def latencies(seconds: Sequence[float]) -> Latencies:
    """The distribution of the seconds of at least one request."""
    ascending = sorted(1000 * value for value in seconds)
    return Latencies(
        mean=math.fsum(ascending) / len(ascending),
        p50=percentile(ascending, 0.5),
        p99=percentile(ascending, 0.99),
        p999=percentile(ascending, 0.999),
        max=ascending[-1],
    )
