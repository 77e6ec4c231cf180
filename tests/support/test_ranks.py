"""A failure on a rank is reported, with where it did, and within the limit."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_on_ranks, run_program_on_ranks


def its_rank(*arguments: int) -> tuple[int, tuple[int, ...]]:
    # The last rank is done first.
    for rank in range(dist.get_world_size() - 1, -1, -1):
        if rank == dist.get_rank():
            found = rank, arguments
        dist.barrier()
    return found


def hash_and_surroundings() -> tuple[int, str, str | None]:
    return hash("table"), os.getcwd(), os.environ.get("LEFT_FOR_RANKS")


def raises_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise LookupError("where is it")
    dist.barrier()


def exits() -> None:
    sys.exit(3)


def exits_at_once() -> None:
    os._exit(0)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs() -> None:
    threading.Event().wait()


def returns_a_lock() -> Any:
    return threading.Lock()


def message_of(num_ranks: int, function: Callable[[], Any], **settings: float) -> str:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(num_ranks, function, **settings)
    return str(caught.value)


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_on_ranks(3, its_rank, 7, 8) == [(rank, (7, 8)) for rank in range(3)]


def test_ranks_are_where_the_test_is_and_differ_in_the_order_of_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_ranks(1, its_rank)  # whatever ranks are made of is older than what follows
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEFT_FOR_RANKS", "a message")
    (one, *here), (other, *there) = run_on_ranks(2, hash_and_surroundings)
    assert here == there == [str(tmp_path), "a message"]
    assert one != other or os.environ.get("PYTHONHASHSEED", "random") != "random"


def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    message = message_of(2, raises_on_one_rank)
    assert message.startswith("rank 1 of 2 failed:\nTraceback")
    assert "in raises_on_one_rank" in message
    assert "LookupError: where is it" in message


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (exits, r"rank 0 of 1 failed:\nTraceback.*in exits\b.*SystemExit: 3"),
        (exits_at_once, r"rank 0 ended with status 0 and returned nothing"),
        (is_killed, r"rank 0 ended by SIGKILL and returned nothing"),
        (crashes, r"rank 0 ended by SIGSEGV and returned nothing\n.*in crashes\b"),
        (returns_a_lock, r"rank 0 of 1 failed:\nTraceback.*TypeError: cannot pickle"),
    ],
)
def test_a_rank_that_ends_is_reported(function: Callable[[], None], pattern: str) -> None:
    assert re.match(pattern, message_of(1, function), re.DOTALL)


def test_a_rank_that_hangs_is_reported_within_the_limit() -> None:
    message = message_of(1, hangs, limit_seconds=1.0)
    assert message.startswith("ranks [0] of 1 took over 1.0 s\nrank 0:\n")
    assert "in hangs" in message


def test_a_program_runs_as_torchrun_would_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "assert sys.argv == [__file__], sys.argv\n"
        "assert rank == dist.get_node_local_rank() == int(os.environ['RANK'])\n"
        "assert dist.is_torchelastic_launched()\n"
        "found = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(found, rank)\n"
        "open(f'rank-{rank}', 'w').write(str(found))\n"
        "dist.destroy_process_group()\n"
    )
    monkeypatch.chdir(tmp_path)
    run_program_on_ranks(2, program)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["[0, 1]"] * 2
    program.write_text("raise LookupError('where is it')\n")
    with pytest.raises(AssertionError, match=r"failed:\nTraceback(.*\n)+LookupError: where is it"):
        run_program_on_ranks(1, program)
