"""Small lookups in a cache on a GPU, each the replay of a CUDA graph."""

import logging
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.serving.levels.embedding_cache import CachedRows, EmbeddingCache
from torchembed.step.graph_capture import captured_graph

_FEWEST_IDS, _MOST_IDS = 256, 8192
"""Ids of the smallest and the largest graph. A lookup of more takes longer on the GPU than in
Python."""
_MOST_OF_A_FORM = 4
"""Graphs of one size for ids on the device, or of the host: lookups that are replayed at once."""
_capturing = threading.Lock()
"""Held by the one thread of the process that captures."""
_logger = logging.getLogger(__name__)


class CapturedRows(NamedTuple):
    """Answer of :meth:`CapturedLookups.look_up`: a :class:`CachedRows` of which the number of ids
    that are not cached is on the host."""

    rows: Tensor
    is_missing: Tensor
    num_missing: int


class CapturedLookup:
    """A lookup of a fixed number of ids, captured in a CUDA graph; on a CPU, which has none, it
    is called again. One thread at a time.

    Args:
        cache: on one device.
        num_ids: the most ids of a lookup.
        from_host: whether ids come in memory of the host, from which the graph copies them.

    Raises:
        Exception: what CUDA raises where the lookup cannot be captured.
    """

    def __init__(self, cache: EmbeddingCache, num_ids: int, *, from_host: bool) -> None:
        self._cache, self._num_given = cache, 0
        device = cache.device
        is_cuda = device.type == "cuda"
        # Keys, and tables behind them, so that from the host both are one copy.
        key_bytes, table_bytes = num_ids * 8, num_ids * 4
        given = torch.zeros(key_bytes + table_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        given[key_bytes:].view(torch.int32).fill_(-1)
        self._inputs = given.to(device)
        self._given = given if from_host else self._inputs
        self._given_keys = self._given[:key_bytes].view(torch.int64)
        self._given_tables = self._given[key_bytes:].view(torch.int32)
        self._keys = self._inputs[:key_bytes].view(torch.int64)
        self._tables = self._inputs[key_bytes:].view(torch.int32)
        num_missing = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
        self._num_missing, self._num_missing_array = num_missing, num_missing.numpy()
        self._found: CachedRows
        self._run()  # so that all kernels are compiled before the capture
        self._graph: torch.cuda.CUDAGraph | None = None
        if is_cuda:
            self._graph = captured_graph(self._run, torch.cuda.Stream(device))
        self._views = self._views_of(0)

    def look_up(self, keys: Tensor, tables: Tensor) -> CapturedRows:
        """As :meth:`CapturedLookups.look_up`."""
        num_ids, access = keys.numel(), self._cache.access
        with access.reading():
            if num_ids != self._num_given:
                if num_ids < self._num_given:
                    self._given_tables[num_ids : self._num_given].fill_(-1)
                self._num_given, self._views = num_ids, self._views_of(num_ids)
            given_keys, given_tables, rows, is_missing = self._views
            # One call, which on a GPU takes a fifth less time than two.
            torch._foreach_copy_(  # type: ignore[reportPrivateImportUsage]
                [given_keys, given_tables], [keys, tables], non_blocking=True
            )
            if self._graph is None:
                self._run()
                rows, is_missing = self._views_of(num_ids)[2:]
            else:
                self._graph.replay()
            # Copies, since the next replay writes where this one did.
            rows, is_missing = rows.clone(), is_missing.clone()
        if self._graph is not None:
            access.stream_of(self._cache.device).synchronize()
        return CapturedRows(rows, is_missing, int(self._num_missing_array[0]))

    def _run(self) -> None:
        if self._given is not self._inputs:
            self._inputs.copy_(self._given, non_blocking=True)
        self._found = self._cache.look_up(self._keys, self._tables)
        self._num_missing.copy_(self._found.num_missing, non_blocking=True)

    def _views_of(self, num_ids: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, tables, rows and flags of the first ids. They are made anew for another number of
        ids alone, since making them takes as long as a copy."""
        found = self._found
        return (
            self._given_keys[:num_ids],
            self._given_tables[:num_ids],
            found.rows[:num_ids],
            found.is_missing[:num_ids],
        )


class CapturedLookups:
    """Captured lookups of one cache, for any number of threads.

    The number of ids is rounded up to a power of two, and the first lookup of a size captures its
    graph, which takes some tenths of a second. The memory of a cache never moves, so that a graph
    sees all that is written there.

    Args:
        cache: on one device.
    """

    def __init__(self, cache: EmbeddingCache) -> None:
        self._cache = cache
        sizes = []
        while not sizes or sizes[-1] < _MOST_IDS:
            sizes.append(2 * sizes[-1] if sizes else _FEWEST_IDS)
        forms = [(size, from_host) for size in sizes for from_host in (False, True)]
        self._free: dict[tuple[int, bool], list[CapturedLookup]] = {form: [] for form in forms}
        self._num_left = dict.fromkeys(forms, _MOST_OF_A_FORM)
        """How many more there may be of each form."""

    def look_up(self, keys: Tensor, tables: Tensor) -> CapturedRows | None:
        """As :meth:`EmbeddingCache.look_up`, for ids on any device, but that it enters the cache's
        ``access`` and waits for the device.

        Returns:
            None for a lookup that is not captured, of which nothing was done: of too many ids, or
            while all graphs of its size are in use.
        """
        num_ids = keys.numel()
        if not 0 < num_ids <= _MOST_IDS:
            return None
        size = max(_FEWEST_IDS, 1 << (num_ids - 1).bit_length())
        form = size, not keys.is_cuda
        lookup = self._take(form)
        if lookup is None:
            return None
        try:
            return lookup.look_up(keys, tables)
        finally:
            self._free[form].append(lookup)

    def _take(self, form: tuple[int, bool]) -> CapturedLookup | None:
        """A lookup that no other thread has, captured where there is none and may be another."""
        try:
            return self._free[form].pop()
        except IndexError:
            pass
        if not self._num_left[form] or not _capturing.acquire(blocking=False):
            return None
        try:
            if not self._num_left[form]:
                return None
            self._num_left[form] -= 1
            size, from_host = form
            with self._cache.access.reading():
                return CapturedLookup(self._cache, size, from_host=from_host)
        except RuntimeError:
            self._num_left = dict.fromkeys(self._num_left, 0)
            _logger.exception("lookups in the cache are no longer captured in CUDA graphs")
            return None
        finally:
            _capturing.release()
