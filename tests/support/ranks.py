"""Runs a function on several real ranks and brings back what each returned or how it failed."""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_SECONDS = 600.0
STARTED, RETURNED, RAISED = "started", "returned", "raised"


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    backend: str,
    folder: str,
    messages: Any,
) -> None:
    with _stacks_file(folder, rank).open("w") as stacks:
        # For the parent to read: where a rank is that crashes, and where one is that hangs.
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            torch.set_num_threads(1)
            if "nccl" in backend:
                torch.cuda.set_device(rank)
            dist.init_process_group(
                backend,
                rank=rank,
                world_size=num_ranks,
                store=dist.FileStore(str(Path(folder) / "store"), num_ranks),
                timeout=datetime.timedelta(seconds=LIMIT_SECONDS / 2),
            )
            messages.put((rank, STARTED, None))
            result = function(*arguments)
            dist.barrier()
            dist.destroy_process_group()
            # Here, and not in the queue's own thread, whose errors nobody sees.
            messages.put((rank, RETURNED, pickle.dumps(result)))
        except BaseException:
            messages.put((rank, RAISED, traceback.format_exc()))
            raise
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()


def run_on_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    backend: str = "gloo",
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Any]:
    """``function(*arguments)`` on each of ``num_ranks`` processes; what each returned, by rank.

    ``function`` is found by its module's name, so it stands at the top level of one. Results are
    pickled: plain Python, or numpy. ``limit_seconds`` are those of the function, once all ranks
    have started.

    Raises:
        AssertionError: with the traceback of the first rank that failed, with where each rank is
            that takes over ``limit_seconds``, or with the signal or exit status of one that ended
            by itself.
    """
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        messages = context.Queue()
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, arguments, rank, num_ranks, backend, folder, messages),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(messages, processes, folder, limit_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    messages: Any, processes: Sequence[BaseProcess], folder: str, limit_seconds: float
) -> list[Any]:
    num_ranks, num_started = len(processes), 0
    by_rank: dict[int, Any] = {}
    end = time.monotonic() + LIMIT_SECONDS
    while len(by_rank) < num_ranks:
        ended = [r for r, p in enumerate(processes) if r not in by_rank and p.exitcode is not None]
        try:
            rank, kind, content = messages.get(timeout=0.2)
        except queue.Empty:
            # Whoever had ended before has no message left to come.
            assert not ended, "\n".join(_how_it_ended(processes[r], r, folder) for r in ended)
            late = sorted(set(range(num_ranks)) - set(by_rank))
            assert time.monotonic() < end, _where_they_are(processes, late, folder, limit_seconds)
            continue
        assert kind != RAISED, f"rank {rank} of {num_ranks} failed:\n{content}"
        if kind == STARTED:
            num_started += 1
            if num_started == num_ranks:
                end = time.monotonic() + limit_seconds
        else:
            by_rank[rank] = pickle.loads(content)
    return [by_rank[rank] for rank in range(num_ranks)]


def _how_it_ended(process: BaseProcess, rank: int, folder: str) -> str:
    status = process.exitcode
    assert status is not None
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"rank {rank} ended {how} and returned nothing\n{_stacks(folder, rank)}"


def _where_they_are(
    processes: Sequence[BaseProcess], late: Sequence[int], folder: str, limit_seconds: float
) -> str:
    for rank in late:
        pid = processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    # They write at once, but for one that is stopped or has not come to Python yet.
    end = time.monotonic() + 5
    while time.monotonic() < end and not all(_stacks(folder, rank) for rank in late):
        processes[late[0]].join(0.05)
    where = "\n".join(f"rank {rank}:\n{_stacks(folder, rank)}" for rank in late)
    return f"ranks {list(late)} of {len(processes)} took over {limit_seconds} s\n{where}"


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"


def _stacks(folder: str, rank: int) -> str:
    file = _stacks_file(folder, rank)
    return file.read_text() if file.exists() else ""
