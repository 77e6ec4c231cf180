"""Seconds from publishing a row until a lookup that hits the cache gives it.

``python -m bench.serving.freshness`` publishes rows at a stated rate from a process of its own,
through the broker inside librdkafka, to lookups of this process on ``--device``. Each row holds
when it was published, by the clock that both processes share; a reader looks cached rows up again
and again, and takes the age of each that is new. Then rows are published at once, for how
many are applied in a second, beside ``LeveledLookup.apply_rows`` alone on as many rows at a time.
"""

import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch
import tyro

from torchembed.serving.levels import EmbeddingCache, LeveledLookup, RowLevels, ServedTable
from torchembed.serving.updates import UpdateApplier
from torchembed.stores import MemoryStore
from torchembed.streams import SourceOptions, UpdatePublisher, UpdateSource

_TABLE = ServedTable(name="t", dim=1)
_AT_ONCE_BYTES = 1 << 24
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is published and read."""

    rows_per_second: int = 10_000
    rows_per_update: int = 100
    num_rows: int = 10_000
    """Of the table, all of them cached."""
    num_read: int = 200
    """That the reader looks up at a time."""
    dim: int = 128
    seconds: float = 20.0
    device: str = "cpu"


class _Models:
    """One lookup, for the applier."""

    def __init__(self, lookup: LeveledLookup) -> None:
        self._lookup = lookup

    def apply_rows(
        self,
        model: str,
        table: str,
        keys: torch.Tensor,
        rows: torch.Tensor,
        *,
        version: int,
        deleted_keys: torch.Tensor | None = None,
    ) -> None:
        self._lookup.apply_rows(table, keys, rows, deleted_keys)

    def swap_dense(self, model: str, tensors: object, version: int) -> None:
        raise NotImplementedError("the bench publishes rows alone")


def _rows(setting: Setting, num_rows: int, begin: float) -> torch.Tensor:
    """Rows that hold the seconds since ``begin``."""
    return torch.full((num_rows, setting.dim), time.time() - begin)


def _publish(messages: Connection, setting: Setting, begin: float) -> None:
    """The publisher's process, with the broker in it; ends when it is told to."""
    import confluent_kafka

    torch.set_num_threads(1)
    holder = confluent_kafka.Producer({"test.mock.num.brokers": "1"})
    (broker,) = holder.list_topics(timeout=10).brokers.values()
    address = f"{broker.host}:{broker.port}"
    with UpdatePublisher(address) as publisher:
        publisher.publish_rows("m", "t", torch.tensor([0]), _rows(setting, 1, begin), version=1)
        publisher.flush(10)
        messages.send(address)
        interval = setting.rows_per_update / setting.rows_per_second
        messages.recv()
        start = time.perf_counter()
        num_updates = int(setting.seconds / interval)
        for number in range(num_updates):
            time.sleep(max(start + number * interval - time.perf_counter(), 0.0))
            _publish_some(publisher, setting, begin)
        publisher.flush(60)
        messages.send(publisher.sequence)
        messages.recv()
        # The broker forgets what is behind some megabytes of a partition.
        update_bytes = setting.rows_per_update * setting.dim * 4
        for _ in range(min(num_updates, _AT_ONCE_BYTES // update_bytes)):
            _publish_some(publisher, setting, begin)
        publisher.flush(60)
        messages.send(publisher.sequence)
        messages.recv()


def _publish_some(publisher: UpdatePublisher, setting: Setting, begin: float) -> None:
    keys = torch.randint(setting.num_rows, (setting.rows_per_update,))
    rows = _rows(setting, len(keys), begin)
    publisher.publish_rows("m", "t", keys, rows, version=1)


def _ages(
    lookup: LeveledLookup, setting: Setting, begin: float, messages: Connection
) -> list[float]:
    """The ages of rows as they were first seen, until the publisher has sent all."""
    keys = torch.arange(setting.num_read)
    tables = torch.zeros(setting.num_read, dtype=torch.int32)
    seen = lookup.look_up(keys, tables).rows[:, 0].cpu()
    ages: list[float] = []
    while not messages.poll():
        rows = lookup.look_up(keys, tables).rows[:, 0].cpu()
        now = time.time() - begin
        ages += (now - rows[rows != seen]).tolist()
        seen = rows
        time.sleep(0.0005)  # or the reader's thread would take all of the interpreter
    return ages


def main(setting: Setting) -> None:
    """Measure, and print."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    begin = time.time()
    process = context.Process(target=_publish, args=(theirs, setting, begin), daemon=True)
    process.start()
    table = dataclasses.replace(_TABLE, dim=setting.dim)
    cache = EmbeddingCache([table], setting.device, num_rows=2 * setting.num_rows)
    with (
        MemoryStore() as store,
        LeveledLookup(cache, RowLevels([store], [table]), hit_rate_threshold=2.0) as lookup,
    ):
        keys = torch.arange(setting.num_rows)
        lookup.apply_rows("t", keys, torch.zeros(len(keys), setting.dim))
        lookup.look_up(keys, torch.zeros(len(keys), dtype=torch.int32))
        source = UpdateSource(ours.recv(), "bench", SourceOptions(session_timeout_seconds=6.0))
        with UpdateApplier(source, _Models(lookup)) as applier:
            _wait_for(applier, 1)
            misses = lookup.statistics().num_missed_ids
            ours.send("begin")
            ages = sorted(_ages(lookup, setting, begin, ours))
            num_messages = ours.recv()
            assert lookup.statistics().num_missed_ids == misses, "a lookup missed the cache"
            print(
                f"{setting.rows_per_second} rows/s of dim {setting.dim}, in updates of "
                f"{setting.rows_per_update}, {setting.seconds:g} s on {setting.device}: "
                f"{len(ages)} rows seen"
            )
            for percentile in _PERCENTILES:
                age = ages[min(int(len(ages) * percentile / 100), len(ages) - 1)]
                print(f"  p{percentile:<5g} {age * 1e3:8.1f} ms")
            print(f"  most   {ages[-1] * 1e3:8.1f} ms")
            _wait_for(applier, num_messages)
            num_applied = applier.statistics().num_rows
            at = time.perf_counter()
            ours.send("at once")
            total = ours.recv()
            _wait_for(applier, total)
            seconds = time.perf_counter() - at
            num_rows = applier.statistics().num_rows - num_applied
        ours.send("end")
        process.join()
        rows_per_message = max(num_rows // (total - num_messages), 1)
        alone = _rate_alone(lookup, setting, rows_per_message)
    rate = num_rows / seconds
    print(
        f"at once, {rows_per_message} rows a message: {rate:.0f} rows/s, {rate / alone:.2f} of "
        f"apply_rows alone ({alone:.0f} rows/s)"
    )


def _wait_for(applier: UpdateApplier, num_messages: int) -> None:
    deadline = time.monotonic() + 60
    while (found := applier.statistics()).num_updates < num_messages:
        assert time.monotonic() < deadline, (num_messages, found, applier.source.statistics)
        time.sleep(0.002)


def _rate_alone(lookup: LeveledLookup, setting: Setting, num_rows: int) -> float:
    keys = torch.randint(setting.num_rows, (500, num_rows))
    rows = torch.zeros(num_rows, setting.dim)
    at = time.perf_counter()
    for of_update in keys:
        lookup.apply_rows("t", of_update, rows)
    return keys.numel() / (time.perf_counter() - at)


if __name__ == "__main__":
    main(tyro.cli(Setting))
