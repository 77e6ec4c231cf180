"""Eviction from partitions in Redis that hold too many rows."""

import threading

import numpy as np

from torchembed.stores.redis.commands import as_decimals, command, exchange, rows_command
from torchembed.stores.redis.layout import PartitionNames, key_fields
from torchembed.stores.redis.nodes import RedisNodes
from torchembed.stores.redis.pages import all_accesses, all_keys
from torchembed.stores.redis.scripts import EVICT_CHOSEN, EVICT_RANDOM
from torchembed.stores.volatile.options import OverflowPolicy, VolatileOptions

_MAX_STEP_ROWS = 10_000
"""Most rows that a step evicts: others wait some 20 ms for it."""


class OverflowResolver:
    """Evicts rows of partitions of one Redis, beside other processes that do.

    A partition keeps exactly ``VolatileOptions.num_rows_left`` rows, whoever evicts them and
    writes meanwhile: Redis itself compares as it evicts, and ends what others have ended.
    """

    def __init__(self, nodes: RedisNodes, options: VolatileOptions) -> None:
        self._nodes = nodes
        self._options = options
        self.num_evicted_rows = 0
        """Rows that this process evicted."""
        self._counting = threading.Lock()
        self._step_rows = min(options.max_batch_rows, _MAX_STEP_ROWS)

    def resolve(self, names: PartitionNames, generation: bytes, num_left: int) -> None:
        """Evict all but ``num_left`` rows of a partition that overflowed in ``generation``."""
        if self._options.overflow_policy is OverflowPolicy.EVICT_RANDOM:
            while self._step(names, EVICT_RANDOM, generation, num_left):
                pass
        else:
            # Those that were used since they were chosen stay, and others are chosen.
            while not self._evict_coldest(names, generation, num_left):
                pass

    def _evict_coldest(self, names: PartitionNames, generation: bytes, num_left: int) -> bool:
        """Evict the coldest keys; False where too many rows are left, since some of these were used
        meanwhile."""
        keys, accesses = self._candidates(names)
        num_going = max(len(keys) - num_left, 1)
        if num_going < len(keys):
            coldest = np.argpartition(accesses, num_going - 1)[:num_going]
            keys, accesses = keys[coldest], accesses[coldest]
        order = np.argsort(accesses, kind="stable")
        for begin in range(0, max(len(order), 1), self._step_rows):
            step = order[begin : begin + self._step_rows]
            columns = (key_fields(keys[step]), as_decimals(accesses[step] + 1))
            if not self._step(names, EVICT_CHOSEN, generation, num_left, *columns):
                return True
        return False

    def _candidates(self, names: PartitionNames) -> tuple[np.ndarray, np.ndarray]:
        """All keys and their accesses, -1 of those whose access was lost, as where Redis evicts by
        a policy of its own."""
        keys, accesses = all_accesses(self._nodes, names.accesses)
        ((num_rows,),) = self._nodes.run([exchange(names.values, command(b"HLEN", names.values))])
        if num_rows > len(keys):
            (of_values,) = all_keys(self._nodes, [names.values])
            others = np.setdiff1d(of_values, keys)
            keys = np.concatenate([keys, others])
            accesses = np.concatenate([accesses, np.full(len(others), -1)])
        return keys, accesses

    def _step(
        self,
        names: PartitionNames,
        script: bytes,
        generation: bytes,
        num_left: int,
        *columns: np.ndarray,
    ) -> int:
        """Evict rows by a script; how many there are too many still."""
        head = [b"EVAL", script, 3, *names, generation, num_left]
        parts = rows_command(head, *columns) if columns else command(*head, self._step_rows)
        (((num_more, num_evicted),),) = self._nodes.run([exchange(names.values, parts)])
        with self._counting:
            self.num_evicted_rows += num_evicted
        return num_more
