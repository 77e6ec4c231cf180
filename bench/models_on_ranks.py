"""The zoo on several ranks: a process of each rank measures entry after entry.

All processes are ended and started anew after an entry that failed on one of them, since the others
may wait for it in a collective, and its device may be left in any state.
"""

import datetime
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bench.report.result_file import Row
from tests.zoo.harness import Kind, words_of_ranks
from torchembed.core.ranks.process_exit import exit_process_with_parent

NOT_MEASURED = "not_printed_because"
Measure = Callable[[Any, str, Callable[[Row], object]], Row]
"""Settings, an entry's name, and what is given the row so far, to the row."""
_START_SECONDS = 300.0
"""Limit on the start of the processes."""
_LOOK_SECONDS = 0.1


def is_one_of_several() -> bool:
    """True where ``torchrun`` has started this process and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """True on rank 0, which prints and writes; also of a process alone."""
    return int(os.environ.get("RANK", "0")) == 0


def rows_of_ranks(
    measure: Measure,
    config: Any,
    names: Iterable[str],
    *,
    entry_seconds: float,
    grace_seconds: float,
) -> Iterator[Row]:
    """The joint row of each entry, on every rank.

    Args:
        measure: found by its module's name; called in processes of its own, in which the default
            process group takes the tensors of the CPU and of the GPUs, where there are any.
        config: the settings, pickled.
        names: of the entries; the same on all ranks. Where rank 0's end, the others' do too.
        entry_seconds: limit on an entry.
        grace_seconds: how long a rank may still take for one that has failed on another rank.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, process = _store(entry_seconds + grace_seconds), None
    given = iter(names)
    try:
        for number in range(2**63):
            name = next(given, None)
            if rank == 0:
                store.set(f"{number} is measured", str(name is not None))
            if store.get(f"{number} is measured") != b"True":
                return
            assert name is not None
            if process is None:
                process = _Process(measure, config, number, entry_seconds)
            failed = f"{number} failed"
            limits = _Limits(entry_seconds, grace_seconds, lambda key=failed: store.check([key]))
            row = process.row(name, limits)
            if has_failed(row):
                store.set(failed, "")
            store.set(f"{number} of {rank}", json.dumps(row))
            # Each of them is there within the limits.
            keys = [f"{number} of {other}" for other in range(num_ranks)]
            rows: list[Row] = [json.loads(store.get(key)) for key in keys]
            if any(map(has_failed, rows)):
                process.end()
                process = None
            yield joint_row(rows)
    finally:
        if process is not None:
            process.end()


def has_failed(row: Row) -> bool:
    """True where something of an entry could not be measured."""
    is_raised = row.get("outcome") == Kind.RAISES.value
    return is_raised or any(key == NOT_MEASURED or key.endswith("_failed") for key in row)


def joint_row(rows: Sequence[Row]) -> Row:
    """One row of an entry's rows by rank: the worst outcome, the longest times, the busy share of
    the least busy GPU, and words with the ranks whose they are."""
    found: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        if key == "outcome":
            found[key] = max(values, key=[kind.value for kind in Kind].index)
        elif key == "gpu_busy":
            found[key] = min(values)
        elif key.endswith("_ms"):
            found[key] = max(values)
        elif key in ("said", NOT_MEASURED) or key.endswith("_failed"):
            found[key] = words_of_ranks([row.get(key, "") for row in rows])
        else:
            found[key] = values[0]
    return found


class _Limits(NamedTuple):
    """When to give an entry up."""

    entry_seconds: float
    grace_seconds: float
    has_failed_elsewhere: Callable[[], bool]
    """From then on it has ``grace_seconds``."""


class _Process:
    """A process of this rank that measures entries, one after the other."""

    def __init__(self, measure: Measure, config: Any, number: int, entry_seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, measure, config, number, entry_seconds)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._has_started = False

    def row(self, name: str, limits: _Limits) -> Row:
        """The row of an entry; of one that took too long or ended the process, what there was of
        it, and why there is no more."""
        self._pipe.send(name)
        row: Row = {"bench": "models", "entry": name}
        end, is_in_grace = time.monotonic() + _START_SECONDS, False
        while time.monotonic() < end:
            if not is_in_grace and limits.has_failed_elsewhere():
                end, is_in_grace = min(end, time.monotonic() + limits.grace_seconds), True
            if not self._pipe.poll(_LOOK_SECONDS):
                continue
            try:
                message = self._pipe.recv()
            except EOFError:
                self._process.join()
                return {**row, NOT_MEASURED: f"it ended with status {self._process.exitcode}"}
            if message is None:
                end = min(end, time.monotonic() + limits.entry_seconds)
                continue
            row, is_whole = message
            if is_whole:
                return row
        why = (
            "it failed on another rank" if is_in_grace else f"it took over {limits.entry_seconds} s"
        )
        return {**row, NOT_MEASURED: why}

    def end(self) -> None:
        """Kill the process; it has ended then."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(
    pipe: Connection, measure: Measure, config: Any, number: int, limit_seconds: float
) -> None:
    """The loop of a process: takes names of entries, and sends their rows."""
    exit_process_with_parent()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore(f"processes from entry {number} on", _store(limit_seconds)),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=limit_seconds),
    )
    while True:
        name = pipe.recv()
        pipe.send(None)
        row = measure(config, name, lambda so_far: pipe.send((so_far, False)))
        pipe.send((row, True))


def _store(seconds: float) -> Store:
    """The ranks' store, which ``torchrun`` holds, for what comes within ``seconds`` of a start."""
    timeout = datetime.timedelta(seconds=_START_SECONDS + seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("zoo", TCPStore(address, port, is_master=False, timeout=timeout))
