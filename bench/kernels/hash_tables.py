"""Measures finding and inserting keys of hash tables by the protocol of HierarchicalKV's benchmark.

``python -m bench.kernels.hash_tables`` fills a table of 2**27 rows (2**26 for 64 columns and more)
up to each load, and then takes batches of 1,048,576 distinct keys of which .6 are held. It prints
2**30 keys a second, from the median time of twenty calls, each from the same table:

- ``find``: the slots of the keys;
- ``find with values``: and the rows of those that are held;
- ``find or insert``: slots are found, touched, and given to the keys that have none, by least
  recent use where buckets are full;
- ``insert and evict``: and the rows of new keys are initialized.

Held keys are those of the batch that was inserted last, as HierarchicalKV takes them; and beside
that any keys of the table, each equally likely or by Zipf's law with the exponent 1.05, where keys
repeat. Keys that are not held are the largest integers, downwards. On a GPU a call is a replayed
CUDA graph, and its time that between two events; the table is put back before each, which also
leaves nothing of it in the cache. A figure is printed only where as many keys were found as should
be, and where the rows found are right.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from torchembed.data import skewed_ids
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    InsertedKeys,
    Policy,
    empty_hash_tables,
    find_slots,
    insert_keys,
    table_shape,
    touch_slots,
)
from torchembed.ops.initialize_rows import initialize_rows
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import InitializedTable, Uniform, initial_values

HIT_RATE = 0.6
Hits = Literal["last", "uniform", "zipf"]
HITS: tuple[Hits, ...] = ("last", "uniform", "zipf")
_UNIT = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A table and the batches that it is given."""

    num_rows: int
    width: int
    num_keys: int
    device: torch.device
    num_calls: int


class MeasuredTable:
    """A table of float32 rows; row of key k: its initial row."""

    def __init__(self, setting: Setting) -> None:
        device = setting.device
        self.setting = setting
        shape = table_shape(setting.num_rows)
        self.held = empty_hash_tables([shape], Policy.LRU, device)
        self.values = initial_values([InitializedTable(1, Uniform(), shape.num_rows)], device)
        self.weight = torch.full((shape.num_rows, setting.width), torch.nan, device=device)
        self.tables = torch.zeros(setting.num_keys, dtype=torch.int32, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_filled = 0

    @property
    def load(self) -> float:
        return int(self.held.counters[0, Counter.SIZE]) / self.weight.shape[0]

    def find(self, keys: Tensor) -> Tensor:
        return find_slots(self.held, keys, self.tables)

    def find_with_values(self, keys: Tensor) -> Tensor:
        return sequence_lookup(self.weight, self.find(keys))

    def find_or_insert(self, keys: Tensor) -> InsertedKeys:
        slots = self.find(keys)
        touch_slots(self.held, slots, self.tables, policy=Policy.LRU, epoch=self.epoch)
        released = self.epoch - 1
        return insert_keys(
            self.held,
            keys,
            self.tables,
            slots,
            policy=Policy.LRU,
            epoch=self.epoch,
            released=released,
        )

    def insert_and_evict(self, keys: Tensor) -> InsertedKeys:
        inserted = self.find_or_insert(keys)
        initialize_rows(
            self.weight,
            (),
            inserted.new_slots,
            inserted.keys,
            inserted.tables,
            self.values,
            num_new=inserted.num_new,
        )
        return inserted

    def fill(self, load: float) -> None:
        """Insert the next integers until ``load`` is reached; a load of 1 until twice as many keys
        came as there are rows, since the last free slots are hit late."""
        num_keys = self.setting.num_keys
        while self.load < load and self.num_filled < 2 * self.weight.shape[0]:
            keys = torch.arange(self.num_filled, self.num_filled + num_keys)
            self.epoch += 1
            self.insert_and_evict(keys.to(self.setting.device))
            self.num_filled += num_keys
        self.epoch += 1

    def batch(self, hits: Hits, seed: int) -> Tensor:
        """Keys in random order, of which ``HIT_RATE`` are held."""
        num_keys, device = self.setting.num_keys, self.setting.device
        num_hits = int(num_keys * HIT_RATE)
        generator = torch.Generator().manual_seed(seed)
        if hits == "last":
            held = torch.arange(self.num_filled - num_keys, self.num_filled, device=device)
            held = held[self.find(held) >= 0][:num_hits]
        else:
            slots = self.held.digests.nonzero().flatten()
            numbers = torch.randint(len(slots), (num_hits,), generator=generator)
            if hits == "zipf":
                numbers = skewed_ids(len(slots), num_hits, seed=seed)
            held = self.held.keys[slots[numbers.to(device)]]
        largest = torch.iinfo(torch.int64).max
        missing = largest - torch.arange(num_keys - len(held), device=device) - seed * num_keys
        order = torch.randperm(num_keys, generator=generator).to(device)
        return torch.cat([held, missing])[order]


def _check(table: MeasuredTable, keys: Tensor) -> None:
    """Raise unless the keys that the table holds, and no others, are found with their rows."""
    largest = torch.iinfo(torch.int64).max
    is_held = keys < largest // 2
    slots = table.find(keys)
    if not torch.equal(slots >= 0, is_held):
        raise RuntimeError("find gave slots for other keys than those that are held")
    expected = torch.zeros(len(keys), table.setting.width, device=keys.device)
    positions = torch.where(is_held, torch.arange(len(keys), device=keys.device), -1)
    initialize_rows(expected, (), positions, keys, table.tables, table.values)
    if not torch.equal(table.find_with_values(keys), expected):
        raise RuntimeError("find gave other rows than those of the keys")


Operation = Callable[[MeasuredTable, Tensor], object]
OPERATIONS: dict[str, Operation] = {
    "find": MeasuredTable.find,
    "find with values": MeasuredTable.find_with_values,
    "find or insert": MeasuredTable.find_or_insert,
    "insert and evict": MeasuredTable.insert_and_evict,
}


def _gpu_seconds(call: Callable[[], object], restore: Callable[[], None], num_calls: int) -> float:
    call()  # compiles what is not compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(num_calls):
        restore()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _cpu_seconds(call: Callable[[], object], restore: Callable[[], None], num_calls: int) -> float:
    times = []
    for _ in range(num_calls):
        restore()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(table: MeasuredTable, hits: Hits) -> dict[str, float]:
    """2**30 keys a second of each operation, on batches whose held keys are those of ``hits``."""
    setting = table.setting
    keys = table.batch(hits, seed=1)
    _check(table, keys)
    saved = [None if tensor is None else tensor.clone() for tensor in table.held]

    def restore() -> None:
        for tensor, copy in zip(table.held, saved, strict=True):
            if tensor is not None and copy is not None:
                tensor.copy_(copy)

    seconds = _gpu_seconds if setting.device.type == "cuda" else _cpu_seconds
    rates = {}
    for name, operation in OPERATIONS.items():
        # Rows of evicted keys are lost by the last one: the others come before it.
        median = seconds(lambda run=operation: run(table, keys), restore, setting.num_calls)
        rates[name] = setting.num_keys / median / _UNIT
    restore()
    _rewrite_rows(table.held, table)
    return rates


def _rewrite_rows(held: HashTables, table: MeasuredTable) -> None:
    """Write the rows of all held keys again, of which measuring gave some to other keys."""
    num_slots = held.digests.numel()
    for first in range(0, num_slots, 1 << 22):
        part = slice(first, min(first + (1 << 22), num_slots))
        slots = torch.arange(part.start, part.stop, device=held.digests.device)
        rows = torch.where(held.digests[part] > 0, slots, -1)
        tables = torch.zeros_like(rows, dtype=torch.int32)
        initialize_rows(table.weight, (), rows, held.keys[part], tables, table.values)


def _number(text: str) -> int:
    base, _, exponent = text.partition("**")
    return int(base) ** int(exponent or 1)


def main(arguments: Sequence[str] | None = None) -> None:
    summary = (__doc__ or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser("python -m bench.kernels.hash_tables", description=summary)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0])
    parser.add_argument("--rows", type=_number, help="2**27, or 2**26 for 64 columns and more")
    parser.add_argument("--keys", type=_number, default=2**20, help="of a batch")
    parser.add_argument("--calls", type=int, default=20, help="of which the median counts")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)

    print("2**30 keys/s".ljust(26) + "".join(name.rjust(18) for name in OPERATIONS))
    for width in options.widths:
        setting = Setting(
            num_rows=options.rows or (2**27 if width < 64 else 2**26),
            width=width,
            num_keys=options.keys,
            device=torch.device(options.device),
            num_calls=options.calls,
        )
        table = MeasuredTable(setting)
        for load in sorted(options.loads):
            table.fill(load)
            for hits in HITS:
                rates = measure(table, hits)
                label = f"{width:4} columns, {table.load:.2f}, {hits}"
                print(label.ljust(26) + "".join(f"{rate:18.3g}" for rate in rates.values()))


if __name__ == "__main__":
    main()
