"""A rank that dies ends the run within a minute, and says why."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raises", r"exitcode +: 1 .*\n(.*\n)* +RuntimeError: the third batch is bad"),
        ("is-killed", r"exitcode +: -9 .*\(SIGKILL\)"),
    ],
    ids=["raises", "is-killed"],
)
def test_a_rank_that_dies_ends_the_run(how: str, cause: str) -> None:
    start = time.monotonic()
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "tests.training.dying_rank", how),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_SECONDS,
        check=False,
    )
    assert time.monotonic() - start < LIMIT_SECONDS
    assert run.returncode == 1
    root_cause = run.stderr.partition("Root Cause (first observed failure)")[2]
    assert re.search(rf"rank +: 1 .*\n +{cause}", root_cause), run.stderr
    # The other rank does not wait for the limit of torchrun: its next collective fails.
    others = run.stderr.partition("Failures:")[2].partition("Root Cause")[0]
    assert re.search(r"rank +: 0 .*\n(.*\n)*.*any_rank_each", others), run.stderr
