"""Runs a function on several real ranks and brings back what each returned or how it failed."""

import contextlib
import datetime
import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_SECONDS = 600.0


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    backend: str,
    folder: str,
    results: Any,
) -> None:
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
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, result))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """``function(*arguments)`` on each of ``num_ranks`` processes; what each returned, by rank.

    ``function`` is found by its module's name, so it stands at the top level of one. Results are
    pickled: plain Python, or numpy.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or after a time limit.
    """
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, arguments, rank, num_ranks, backend, folder, results),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, num_ranks)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(results: Any, processes: list[Any], num_ranks: int) -> list[Any]:
    by_rank: dict[int, Any] = {}
    end = datetime.datetime.now() + datetime.timedelta(seconds=LIMIT_SECONDS)
    while len(by_rank) < num_ranks:
        with contextlib.suppress(queue.Empty):
            rank, succeeded, result = results.get(timeout=0.2)
            assert succeeded, f"rank {rank} of {num_ranks} failed:\n{result}"
            by_rank[rank] = result
            continue
        dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
        assert not dead, f"ranks {dead} of {num_ranks} died without a traceback"
        assert datetime.datetime.now() < end, (
            f"ranks {sorted(set(range(num_ranks)) - set(by_rank))} took over {LIMIT_SECONDS} s"
        )
    return [by_rank[rank] for rank in range(num_ranks)]
