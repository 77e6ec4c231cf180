"""A rank that dies ends the run within minutes, and not once collectives give up, and says why."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 300
"""From its death to the end of the run; without our part it is half an hour."""
CAUSES = {
    "raises": r"exitcode +: 1 .*\n(.*\n)* +RuntimeError: the third batch is bad",
    "is-killed": r"exitcode +: -9 (.*\n)+?.*Signal 9 \(SIGKILL\)",
}


def run_until_a_rank_fails(how: str, device: str) -> str:
    """The words of ``torchrun`` about the failures, within the limit."""
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            # A busy machine takes a while to end a rank, and each is to end by itself.
            *("--monitor-interval", "3"),
            *("--nproc-per-node", "2", "-m", "tests.training.dying_rank", how, device),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | hidden,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_SECONDS,
        check=False,
    )
    end = time.monotonic()
    failed = re.search(r"^fails at ([\d.]+) s$", run.stdout, re.MULTILINE)
    assert failed, run.stderr
    assert end - float(failed[1]) < LIMIT_SECONDS, run.stderr
    assert run.returncode == 1
    return run.stderr


def check_failures(printed: str, cause: str) -> None:
    """Each rank's end is told. Which of the two ``torchrun`` saw first is the machine's matter.

    The other rank does not wait for the limit of ``torchrun``: its next
    collective fails, within less time than passes between two looks of
    ``torchrun`` at a process that is gone.
    """
    _, *failures = re.split(r"\n +rank +: ", printed.partition("Failures:")[2])
    of_rank = {int(failure[0]): failure for failure in failures}
    assert sorted(of_rank) == [0, 1], printed
    assert re.match(rf"1 .*\n +{cause}", of_rank[1]), printed
    assert "any_rank_each" in of_rank[0], printed


@pytest.mark.parametrize("how", CAUSES)
def test_a_rank_that_dies_ends_the_run(how: str) -> None:
    check_failures(run_until_a_rank_fails(how, "cpu"), CAUSES[how])


def needs_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and {torch.cuda.device_count()} is here")


@pytest.mark.gpu
@pytest.mark.parametrize("how", CAUSES)
def test_a_rank_that_dies_ends_captured_steps(how: str) -> None:
    """The other GPU waits, inside a graph, for what never comes."""
    needs_two_gpus()
    check_failures(run_until_a_rank_fails(how, "cuda"), CAUSES[how])


@pytest.mark.gpu
def test_a_stalled_gpu_ends_the_run() -> None:
    """No process is gone, and no watchdog sees collectives inside a graph: the deadline does."""
    needs_two_gpus()
    printed = run_until_a_rank_fails("stalls", "cuda")
    assert re.search("TimeoutError: the GPU has not finished a step in 5 s", printed), printed
