"""Small lookups in a cache on a GPU, each the replay of a CUDA graph."""

import logging
import threading

import torch
from torch import Tensor

from torchembed.serving.levels.embedding_cache import CachedRows, EmbeddingCache, FoundRows
from torchembed.step.graph_capture import captured_graph

_FEWEST_IDS, _MOST_IDS = 256, 8192
"""Ids of the smallest and the largest graph. A lookup of more takes longer on the GPU than in
Python."""
_MOST_OF_A_SIZE = 4
"""Graphs of one size, and so lookups of it that are replayed at once."""
_capturing = threading.Lock()
"""Held by the one thread of the process that captures."""
_logger = logging.getLogger(__name__)


class CapturedLookup:
    """A lookup of a fixed number of ids, captured in a CUDA graph; on a CPU, which has none, it
    is called again. One thread at a time, which is inside ``cache.access`` but in
    :meth:`num_missing`.

    Args:
        cache: on one device.
        num_ids: the most ids of a lookup.

    Raises:
        Exception: what CUDA raises where the lookup cannot be captured.
    """

    def __init__(self, cache: EmbeddingCache, num_ids: int) -> None:
        self._cache, device = cache, cache.device
        self._keys = torch.zeros(num_ids, dtype=torch.int64, device=device)
        self._tables = torch.full((num_ids,), -1, dtype=torch.int32, device=device)
        self._num_given = 0
        is_cuda = device.type == "cuda"
        self._num_missing = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
        self._run()  # so that all kernels are compiled before the capture
        self._graph: torch.cuda.CUDAGraph | None = None
        if is_cuda:
            self._done = torch.cuda.Event()
            self._graph = captured_graph(self._run, torch.cuda.Stream(device))

    def enqueue(self, keys: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Look up ids on the current stream; arguments as :meth:`EmbeddingCache.look_up`, on any
        device. Returns its rows and which ids are missing, in memory of their own."""
        num_ids = keys.numel()
        self._keys[:num_ids].copy_(keys, non_blocking=True)
        self._tables[:num_ids].copy_(tables, non_blocking=True)
        if num_ids < self._num_given:
            self._tables[num_ids : self._num_given].fill_(-1)
        self._num_given = num_ids
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        # Copies, since the next replay writes where this one did.
        rows, is_missing = self._rows[:num_ids].clone(), self._is_missing[:num_ids].clone()
        if self._graph is not None:
            self._done.record(torch.cuda.current_stream(self._cache.device))
        return rows, is_missing

    def num_missing(self) -> Tensor:
        """How many ids were missing, int64 ``[1]`` on the CPU; waits for the lookup, and for the
        copies of its results."""
        if self._graph is not None:
            self._done.synchronize()
        return self._num_missing.clone()

    def _run(self) -> None:
        found = self._cache.look_up(self._keys, self._tables)
        self._rows, self._is_missing = found.rows, found.is_missing
        self._num_missing.copy_(found.num_missing, non_blocking=True)


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
        self._free: dict[int, list[CapturedLookup]] = {size: [] for size in sizes}
        self._num_left = dict.fromkeys(sizes, _MOST_OF_A_SIZE)
        """How many more there may be of each size."""

    def look_up(self, keys: Tensor, tables: Tensor) -> CachedRows | None:
        """As :meth:`EmbeddingCache.look_up`, for ids on any device, but that it enters the cache's
        ``access``, waits for the device, and has the number of missing ids on the CPU. ``found``
        of the answer has no parts.

        Returns:
            None for a lookup that is not captured, of which nothing was done: of too many ids, or
            while all graphs of its size are in use.
        """
        num_ids = keys.numel()
        if not 0 < num_ids <= _MOST_IDS:
            return None
        size = max(_FEWEST_IDS, 1 << (num_ids - 1).bit_length())
        lookup = self._take(size)
        if lookup is None:
            return None
        try:
            with self._cache.access.reading():
                rows, is_missing = lookup.enqueue(keys, tables)
            num_missing = lookup.num_missing()
        finally:
            self._free[size].append(lookup)
        found = FoundRows((), is_missing, num_missing)
        return CachedRows(rows, is_missing, num_missing, found)

    def _take(self, size: int) -> CapturedLookup | None:
        """A lookup that no other thread has, captured where there is none and may be another."""
        try:
            return self._free[size].pop()
        except IndexError:
            pass
        if not self._num_left[size] or not _capturing.acquire(blocking=False):
            return None
        try:
            if not self._num_left[size]:
                return None
            self._num_left[size] -= 1
            with self._cache.access.reading():
                return CapturedLookup(self._cache, size)
        except RuntimeError:
            self._num_left = dict.fromkeys(self._num_left, 0)
            _logger.exception("lookups in the cache are no longer captured in CUDA graphs")
            return None
        finally:
            _capturing.release()
