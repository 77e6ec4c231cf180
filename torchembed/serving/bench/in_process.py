"""Times of a model without a protocol: of its lookups alone, and of whole answers."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchembed.serving.bench.latencies import Latencies, latencies
from torchembed.serving.bench.made_requests import MadeRequests
from torchembed.serving.datatypes import datatype_of
from torchembed.serving.levels import EmbeddingCache, LeveledLookup, RowLevels, ServedTable
from torchembed.serving.models import ModelOptions, ModelRepository
from torchembed.stores import MemoryStore

_NUM_REQUESTS = 16
"""Different requests that are asked in turn."""


class InProcessResult(NamedTuple):
    """Latencies of one batch size."""

    batch_size: int
    hit_rate: float
    """The part of all ids that were cached."""
    answer: Latencies
    """From arrays on the host to arrays on the host."""
    samples_per_second: float


def measure(
    folder: Path,
    model: str,
    batch_sizes: list[int],
    *,
    device: torch.device,
    cached_share: float,
    seconds: float,
    num_ids: int,
    exponent: float,
) -> Iterator[InProcessResult]:
    """Ask the newest version of a model in one thread, for each batch size some seconds.

    Args:
        folder: of all models.
        cached_share: the part of all rows that the cache has room for.
    """

    def make(tables: Mapping[ServedTable, int]) -> LeveledLookup:
        served = list(tables)
        num_rows = {t.name: max(1, round(n * cached_share)) for t, n in tables.items()}
        cache = EmbeddingCache(served, device, num_rows=num_rows)
        return LeveledLookup(cache, RowLevels([store], served), hit_rate_threshold=2.0)

    options = ModelOptions(make_lookup=make, device=device)
    with (
        MemoryStore() as store,
        ModelRepository(folder, options, models={model: options}) as repository,
    ):
        repository.start()
        served = repository.model(model)
        forms: list[dict[str, Any]] = [
            {"name": i.name, "datatype": datatype_of(i.dtype), "shape": i.shape}
            for i in served.form.inputs
        ]
        for batch_size in batch_sizes:
            made = MadeRequests(forms, batch_size=batch_size, num_ids=num_ids, exponent=exponent)
            requests = [made.make() for _ in range(_NUM_REQUESTS)]
            for request in requests:
                served.answer(request)
            before = _hits(repository)
            taken = _timed(served.answer, requests, seconds)
            hits, misses = (a - b for a, b in zip(_hits(repository), before, strict=True))
            yield InProcessResult(
                batch_size=batch_size,
                hit_rate=hits / max(1, hits + misses),
                answer=latencies(taken),
                samples_per_second=batch_size * len(taken) / sum(taken),
            )


def _timed(
    ask: Callable[[dict[str, np.ndarray]], object],
    requests: list[dict[str, np.ndarray]],
    seconds: float,
) -> list[float]:
    """The seconds of each of as many calls as there is time for, at least one of each request."""
    taken: list[float] = []
    while sum(taken) < seconds or len(taken) < len(requests):
        begin = time.perf_counter()
        ask(requests[len(taken) % len(requests)])
        taken.append(time.perf_counter() - begin)
    return taken


def _hits(repository: ModelRepository) -> tuple[int, int]:
    lookups = {id(lookup): lookup for lookup in repository.lookups().values()}
    counts = [c for lookup in lookups.values() for c in lookup.statistics().tables.values()]
    return sum(c.num_hits for c in counts), sum(c.num_misses for c in counts)
