"""Processes that apply updates to a store on disk, and are killed before they commit them."""

import dataclasses
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.followed_models import followed_models
from tests.support.store_processes import LIMIT_SECONDS
from torchembed.serving.updates import ApplierOptions, UpdateApplier
from torchembed.stores import RocksDBStore
from torchembed.streams import SourceOptions, UpdateSource

GROUP, DIM = "killed", 4
_OPTIONS = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0, max_messages=5)


class _DyingSource(UpdateSource):
    """Kills its process in place of the commit after so many messages."""

    num_messages = 1 << 62

    def commit(self) -> None:
        if self.statistics.num_messages >= self.num_messages:
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit()


def apply_until_killed(messages: Connection, addresses: str, path: Path, num_messages: int) -> None:
    """Apply updates of table ``m/t`` until so many messages came, and die before these are
    committed."""
    source = _DyingSource(addresses, GROUP, _OPTIONS)
    source.num_messages = num_messages
    with (
        RocksDBStore(path) as store,
        followed_models({"m/t": DIM}, [store]) as models,
        UpdateApplier(source, models, ApplierOptions(poll_timeout_seconds=0.05)),
    ):
        messages.send("started")
        time.sleep(LIMIT_SECONDS)


def apply_to_the_end(
    messages: Connection, addresses: str, path: Path, ids: list[int], last_version: int
) -> None:
    """Apply updates until a row of each partition is of the last version; sends the rows by id, and
    how many updates were applied."""
    source = UpdateSource(addresses, GROUP, _OPTIONS)
    with (
        RocksDBStore(path) as store,
        followed_models({"m/t": DIM}, [store]) as models,
        UpdateApplier(source, models, ApplierOptions(poll_timeout_seconds=0.05)) as applier,
    ):
        deadline = time.monotonic() + LIMIT_SECONDS
        while models.applied.get("m/t", []).count(last_version) < source.num_partitions or (
            not source.num_partitions
        ):
            assert time.monotonic() < deadline, (source.statistics, applier.statistics())
            time.sleep(0.01)
        found = models.rows_of("m/t", ids)
        # Updates are counted behind their rows, and all of them are once it has ended.
        applier.close()
        num_applied = applier.statistics().num_updates
    messages.send((num_applied, {id_: row.tolist() for id_, row in found.items()}))


def apply_without_going_back(
    messages: Connection,
    addresses: str,
    path: Path,
    ids: list[int],
    last_version: int,
    max_messages: int,
    num_applied: int | None,
) -> None:
    """Apply updates of rows that hold their version, and see that none ever holds an earlier one.

    Dies behind so many writes of rows, before they are on record as applied, or where None is
    given goes on until rows of each partition are of the last version; sends the versions.
    """
    options = dataclasses.replace(_OPTIONS, max_messages=max_messages)
    source = UpdateSource(addresses, GROUP, options)
    with RocksDBStore(path) as store, followed_models({"m/t": DIM}, [store]) as models:

        def versions() -> dict[int, int]:
            return {id_: int(row[0]) for id_, row in models.rows_of("m/t", ids).items()}

        seen, failures, apply_rows = versions(), [], models.apply_rows

        def checked(*arguments: Any, **named: Any) -> None:
            apply_rows(*arguments, **named)
            found = versions()
            failures.extend(i for i, v in seen.items() if found.get(i, 0) < v)
            seen.update(found)
            if num_applied is not None and len(models.applied["m/t"]) >= num_applied:
                messages.send(failures)
                os.kill(os.getpid(), signal.SIGKILL)

        models.apply_rows = checked  # type: ignore[method-assign]
        applying = ApplierOptions(poll_timeout_seconds=0.05)
        with UpdateApplier(source, models, applying, records=store) as applier:
            deadline = time.monotonic() + LIMIT_SECONDS
            while list(seen.values()).count(last_version) < len(ids):
                assert time.monotonic() < deadline, (source.statistics, applier.statistics())
                time.sleep(0.01)
            messages.send((failures, dict(applier.statistics().num_dropped)))
