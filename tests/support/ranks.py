"""Runs a function on several real ranks and brings back what each returned or how it failed; or a
program, as ``torchrun`` does."""

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support import interpreter
from tests.support.rank_processes import Ended, Forked, RankProcesses

LIMIT_SECONDS = 600.0
STACKS_SECONDS = 30.0
"""How long ranks that hang are waited for to say where."""
STARTED, RETURNED, RAISED = "started", "returned", "raised"


class _Raised(NamedTuple):
    """How a rank failed."""

    seconds: float
    """When, by the clock that all ranks read."""
    text: str


@contextlib.contextmanager
def _reporting(messages: Connection, rank: int, folder: str) -> Iterator[None]:
    """Sends how the rank failed, if it does, and writes where it is when asked or crashed."""
    with _stacks_file(folder, rank).open("w") as stacks:
        # For the tests' process to read: where a rank is that crashes, and where one is that hangs.
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            torch.set_num_threads(1)
            yield
        except BaseException:
            messages.send((rank, RAISED, _Raised(time.monotonic(), traceback.format_exc())))
            raise
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()


def _call_main(
    messages: Connection, call: bytes, rank: int, num_ranks: int, backend: str, folder: str
) -> None:
    with _reporting(messages, rank, folder):
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=num_ranks,
            store=dist.FileStore(str(Path(folder) / "store"), num_ranks),
            timeout=datetime.timedelta(seconds=LIMIT_SECONDS / 2),
        )
        interpreter.leave_out_what_changes_nothing()
        function, arguments = pickle.loads(call)
        gc.freeze()  # what modules hold lasts as long as the rank
        messages.send((rank, STARTED, None))
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        # Pickled by value: the pipe's own pickler would share a tensor's memory, and this ends.
        messages.send((rank, RETURNED, pickle.dumps(result)))


def _program_main(
    messages: Connection, program: Path, rank: int, num_ranks: int, port: int, folder: str
) -> None:
    with _reporting(messages, rank, folder):
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        sys.argv = [str(program)]
        messages.send((rank, STARTED, None))
        runpy.run_path(str(program), run_name="__main__")
        messages.send((rank, RETURNED, pickle.dumps(None)))


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
    call = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = [(call, rank, num_ranks, backend, folder) for rank in range(num_ranks)]
        return _collected(RankProcesses(_call_main, of_ranks), num_ranks, folder, limit_seconds)


def run_program_on_ranks(
    num_ranks: int, program: Path, *, limit_seconds: float = LIMIT_SECONDS
) -> None:
    """Run a program of Python on each of ``num_ranks`` processes, with the environment that
    ``torchrun --nproc-per-node`` gives it; much faster, since torch is imported there.

    Raises:
        AssertionError: as :func:`run_on_ranks`.
    """
    # As the agent of torchrun, this process serves the store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = [(program, rank, num_ranks, store.port, folder) for rank in range(num_ranks)]
        _collected(RankProcesses(_program_main, of_ranks), num_ranks, folder, limit_seconds)


def _collected(
    processes: RankProcesses, num_ranks: int, folder: str, limit_seconds: float
) -> list[Any]:
    try:
        return _collect(processes, num_ranks, folder, limit_seconds)
    finally:
        processes.end()


def _collect(
    processes: RankProcesses, num_ranks: int, folder: str, limit_seconds: float
) -> list[Any]:
    num_started = 0
    pids: dict[int, int] = {}
    by_rank: dict[int, Any] = {}
    end = time.monotonic() + LIMIT_SECONDS
    while len(by_rank) < num_ranks:
        for message in processes.messages(timeout_seconds=0.2):
            if isinstance(message, Forked):
                pids[message.rank] = message.pid
                continue
            if isinstance(message, Ended):
                # Before it comes what the rank had sent.
                assert message.rank in by_rank, _how_it_ended(message, folder)
                continue
            rank, kind, content = message
            if kind == RAISED:
                raise AssertionError(_first_failure([message, *processes.end()], num_ranks))
            if kind == STARTED:
                num_started += 1
                if num_started == num_ranks:
                    end = time.monotonic() + limit_seconds
            else:
                by_rank[rank] = pickle.loads(content)
        if time.monotonic() >= end:
            late = {rank: pids.get(rank) for rank in range(num_ranks) if rank not in by_rank}
            raise AssertionError(_where_they_are(late, num_ranks, folder, limit_seconds))
    return [by_rank[rank] for rank in range(num_ranks)]


def _first_failure(messages: Iterable[Any], num_ranks: int) -> str:
    """What the rank raised that failed first, of messages of which any may have come first: other
    ranks fail by its end, and another template passes their words on."""
    raised = [
        (content, rank)
        for rank, kind, content in (m for m in messages if not isinstance(m, Forked | Ended))
        if kind == RAISED
    ]
    content, rank = min(raised)
    return f"rank {rank} of {num_ranks} failed:\n{content.text}"


def _how_it_ended(ended: Ended, folder: str) -> str:
    status = ended.status
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"rank {ended.rank} ended {how} and returned nothing\n{_stacks(folder, ended.rank)}"


def _where_they_are(
    late: Mapping[int, int | None], num_ranks: int, folder: str, limit_seconds: float
) -> str:
    for pid in late.values():
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    # They write soon, line by line, but for one that is stopped or has not come to Python yet.
    end = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < end and not all(_is_whole(_stacks(folder, rank)) for rank in late):
        time.sleep(0.05)
    where = "\n".join(f"rank {rank}:\n{_stacks(folder, rank)}" for rank in late)
    return f"ranks {list(late)} of {num_ranks} took over {limit_seconds} s\n{where}"


def _is_whole(stacks: str) -> bool:
    """Whether the last thread's outermost frame is there, or those above the most that are told."""
    return stacks.endswith((" in <module>\n", "  ...\n"))


def _stacks_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"


def _stacks(folder: str, rank: int) -> str:
    file = _stacks_file(folder, rank)
    return file.read_text() if file.exists() else ""
