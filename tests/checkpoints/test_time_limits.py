"""Saves and loads that not every rank comes to end within the time limit and name the ranks."""

import datetime
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.rank_processes import Ended, Forked, RankProcesses
from torchembed.checkpoints.files.storage import Storage
from torchembed.core import ranks
from torchembed.core.ranks import roll_call
from torchembed.training import CheckpointFolder, TrainingRun

LIMIT_SECONDS = 5.0
HANG_SECONDS = 300.0
"""Limit of a test; torch's own for a process group is 1800."""
GENEROUS = datetime.timedelta(seconds=HANG_SECONDS)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return "no error"


def shared_store(name: str, folder: Path) -> dist.Store:
    """By a file, or by rank 0, which serves it as it does where ranks are started by hand."""
    by_file = dist.FileStore(str(folder / name), -1)
    if name == "file":
        return by_file
    if int(os.environ["RANK"]) == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        by_file.set("port", str(served.port))
        return served
    return dist.TCPStore("127.0.0.1", int(by_file.get("port")), is_master=False)


def rank_main(
    messages: Connection,
    scenario: Callable[[Path], Any],
    rank: int,
    num_ranks: int,
    store: str,
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=num_ranks,
        store=shared_store(store, folder),
        timeout=GENEROUS,
    )
    # The limit is of what follows once all ranks are there, however late one was started.
    dist.barrier()
    limit = datetime.timedelta(seconds=LIMIT_SECONDS)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    messages.send((rank, scenario(folder)))


def results_of(
    scenario: Callable[[Path], Any], num_ranks: int, expected: set[int], folder: Path, store: str
) -> dict[int, Any]:
    """What ``scenario(folder)`` returned on the ``expected`` ranks; all ranks are killed then."""
    of_ranks = [(scenario, rank, num_ranks, store, folder) for rank in range(num_ranks)]
    processes = RankProcesses(rank_main, of_ranks)
    end = time.monotonic() + HANG_SECONDS
    try:
        found: dict[int, Any] = {}
        while not expected <= set(found):
            assert time.monotonic() < end, f"only ranks {sorted(found)} ended"
            for message in processes.messages(timeout_seconds=1.0):
                if isinstance(message, Ended):
                    assert message.rank in found, f"rank {message.rank} failed: see standard error"
                elif not isinstance(message, Forked):
                    rank, result = message
                    found[rank] = result
        return found
    finally:
        processes.end()


def new_run() -> TrainingRun:
    return TrainingRun(model=nn.Linear(2, 2))


def stop_this_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def rank_1_stops_while_it_writes(folder: Path) -> list[str]:
    path = folder / "checkpoints"
    CheckpointFolder(path, timeout=GENEROUS).save(1, new_run())
    if ranks.rank() == 1:
        Storage.create_stream = stop_this_process  # type: ignore[assignment]
    return [
        error_of(lambda: CheckpointFolder(path).save(2, new_run())),
        error_of(lambda: CheckpointFolder(path).load(new_run())),
        str(CheckpointFolder(path).steps()),
    ]


def only_rank_0_saves(folder: Path) -> list[str]:
    side = dist.FileStore(str(folder / "side"), -1)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    errors = []
    if ranks.rank() == 0:
        soon = CheckpointFolder(folder / "checkpoints", timeout=datetime.timedelta(seconds=1))
        errors.append(error_of(lambda: soon.save(1, new_run())))
        errors.append(error_of(lambda: checkpoints.save(1, new_run())))
        side.set("first save has failed", "")
    side.wait(["first save has failed"], GENEROUS)
    checkpoints.save(2, new_run())
    if ranks.rank() == 0:
        errors.append(error_of(lambda: checkpoints.save(3, new_run())))
        errors.append(str(checkpoints.steps()))
        side.set("last save has failed", "")
    side.wait(["last save has failed"], GENEROUS)
    return errors


def rank_0_stops_with_the_store(folder: Path) -> list[str]:
    roll_call.STORE_SECONDS = 2.0
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoints.save(1, new_run())
    if ranks.rank() == 0:
        stop_this_process()
    return [
        error_of(lambda: checkpoints.save(2, new_run())),
        error_of(lambda: CheckpointFolder(folder / "checkpoints").load(new_run())),
    ]


def test_a_stopped_rank_is_named_by_all_others(tmp_path: Path) -> None:
    found = results_of(rank_1_stops_while_it_writes, 3, {0, 2}, tmp_path, "file")
    for saved, loaded, steps in found.values():
        # One of the two gives up first, and the other loses its connection to it.
        assert re.match(
            r"(TimeoutError|ConnectionError): could not save a checkpoint of step 2 in .*rank 1 "
            r"(did not come within 5 s|had not come by then)",
            saved,
        ), saved
        assert re.match(
            r"TimeoutError: could not load a checkpoint of .*: rank 1 did not come within 5 s; "
            r"every rank must call it, and .* a longer timeout$",
            loaded,
        ), loaded
        assert steps == "[1]"
    assert any(errors[0].startswith("TimeoutError") for errors in found.values())


def test_a_save_that_one_rank_calls_ends_and_names_the_others(tmp_path: Path) -> None:
    *errors, steps = results_of(only_rank_0_saves, 2, {0}, tmp_path, "file")[0]
    for error, step, seconds in zip(errors, (1, 1, 3), (1, 5, 5), strict=True):
        assert error.startswith(f"TimeoutError: could not save a checkpoint of step {step} in ")
        assert f": rank 1 did not come within {seconds} s; every rank must call it" in error
    assert steps == "[2]"


def test_a_stopped_rank_that_serves_the_store_makes_none_hang(tmp_path: Path) -> None:
    saved, loaded = results_of(rank_0_stops_with_the_store, 2, {1}, tmp_path, "rank 0")[1]
    for error in (saved, loaded):
        assert error.startswith("TimeoutError: could not "), error
        assert "which rank 0 or torchrun serves, does not answer (no answer within 2 s)" in error
