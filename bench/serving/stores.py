"""Rows a second that stores of rows write and read.

``python -m bench.serving.stores`` writes a table whole, then reads and overwrites rows of random
keys, in memory, in bounded memory, in RocksDB in a folder of its own, and, with ``--redis URL``, in
that Redis, in which its table stays. Each figure is the median of the rounds, beside that of
``torch.Tensor.index_select`` and ``index_copy_`` on an array of the same lines.
"""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import tyro

from torchembed.stores import (
    MemoryStore,
    RedisOptions,
    RedisStore,
    RocksDBStore,
    RowStore,
    VolatileMemoryStore,
    VolatileOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of the measurements."""

    num_rows: int = 200_000
    line_bytes: int = 512
    rows_per_call: int = 4096
    num_calls: int = 20
    """In each round."""
    num_rounds: int = 3
    redis: str | None = None
    """``redis://host:port``; without it Redis is left out."""


def main(setting: Setting) -> None:
    """Print a line for each store."""
    print(
        f"{setting.num_rows:,} rows of {setting.line_bytes} bytes, {setting.rows_per_call} a call"
    )
    print(f"{'':16}{'filled':>12}{'read':>12}{'overwritten':>12}  rows/s")
    array = torch.zeros(setting.num_rows, setting.line_bytes, dtype=torch.uint8)

    def read_array(keys: torch.Tensor, lines: torch.Tensor) -> None:
        torch.index_select(array, 0, keys, out=lines)

    def write_array(keys: torch.Tensor, lines: torch.Tensor) -> None:
        array.index_copy_(0, keys, lines)

    base = _measure("array", setting, read_array, write_array)
    for name, opened in _stores(setting):
        with opened as store:
            table = store.table("torchembed.bench", setting.line_bytes)
            found = _measure(name, setting, table.read, table.write)
            ratios = ", ".join(f"{b / f:.1f}" for b, f in zip(base, found, strict=True))
            print(f"{'':16}the array is faster by {ratios}")


def _stores(setting: Setting) -> Iterator[tuple[str, contextlib.AbstractContextManager[RowStore]]]:
    yield "memory", MemoryStore()
    yield "volatile memory", VolatileMemoryStore()
    with tempfile.TemporaryDirectory() as folder:
        yield "RocksDB", RocksDBStore(f"{folder}/rows")
    if setting.redis is not None:
        yield "Redis", RedisStore(RedisOptions.from_url(setting.redis), VolatileOptions())


def _measure(
    name: str,
    setting: Setting,
    read: Callable[[torch.Tensor, torch.Tensor], object],
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> tuple[float, float, float]:
    """Rows a second of filling, reading and overwriting; prints them."""
    torch.manual_seed(0)
    lines = torch.randint(256, (setting.rows_per_call, setting.line_bytes), dtype=torch.uint8)
    all_keys = torch.randperm(setting.num_rows)
    begin = time.perf_counter()
    for keys in all_keys.split(setting.rows_per_call):
        write(keys, lines[: len(keys)])
    rates = [setting.num_rows / (time.perf_counter() - begin)]
    for call in (read, write):
        call(all_keys[: setting.rows_per_call], lines)
        of_rounds = []
        for _ in range(setting.num_rounds):
            chosen = [
                torch.randint(setting.num_rows, (setting.rows_per_call,))
                for _ in range(setting.num_calls)
            ]
            begin = time.perf_counter()
            for keys in chosen:
                call(keys, lines)
            seconds = time.perf_counter() - begin
            of_rounds.append(setting.num_calls * setting.rows_per_call / seconds)
        rates.append(statistics.median(of_rounds))
    print(f"{name:16}" + "".join(f"{rate:12,.0f}" for rate in rates), flush=True)
    return rates[0], rates[1], rates[2]


if __name__ == "__main__":
    main(tyro.cli(Setting))
