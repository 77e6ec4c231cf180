"""A recipe on two ranks, also as ``make train`` starts it."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from recipes.train import main
from tests.support import made_data
from tests.support.ranks import run_on_ranks
from tests.support.waiting import wait_until
from torchembed.training import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m torch.distributed.run`` with two gloo ranks."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return subprocess.run(
        [sys.executable, *start, "-m", "recipes.train", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def train(*arguments: str) -> tuple[str, str]:
    """On a rank: what a run prints, and says on standard error."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        main(arguments)
    return printed.getvalue(), said.getvalue()


def test_two_ranks_end_with_one_result(tmp_path: Path) -> None:
    """The model has dynamic tables that evict, and static ones beside them."""
    made_data.write_ml1m(tmp_path)
    (printed, said), (of_rank_1, _) = run_on_ranks(
        2, train,
        "ctr-ml1m", "--data", str(tmp_path), "--output", str(tmp_path / "out"),
        "--embedding-dim", "4", "--layer-sizes", "8", "--batch-size", "64", "--batch-norm",
        "--placement", "ROW_WISE", "--max-epochs", "2", "--seeds", "1", "--dynamic",
        "--capacity", "0.5",
    )  # fmt: skip
    assert of_rank_1 == ""
    lines = printed.splitlines()
    assert [line for line in lines if line.startswith("RESULT ")] == lines[-1:]
    result = json.loads(lines[-1].removeprefix("RESULT "))
    assert result["num_ranks"] == 2
    assert 0 <= result["test_auc"] <= 1
    assert 0 <= result["modulo_auc"] <= 1
    assert result["modulo_auc"] != result["test_auc"]
    assert len(list(Path(result["checkpoint"]).glob("*/*.distcp"))) == 2
    assert "seed 1:" in said


def test_ranks_end_with_a_torchrun_that_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    """The run has dynamic tables that evict."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.Popen(
        [
            *(sys.executable, *start, "-m", "recipes.train", "dlrm_dcnv2"),
            *("--output", str(tmp_path / "out"), "--click-log.num-train", "2200"),
            *("--click-log.num-held-out", "300", "--epochs", "1000", "--batch-size", "128"),
            *("--embedding-dim", "4", "--dense-arch", "8", "4", "--over-arch", "8", "1"),
            *("--num-cross-layers", "1", "--low-rank", "2", "--evaluate-every", "4"),
            *("--checkpoint-every", "2", "--dynamic", "--capacity", "0.3"),
            *("--placement", "ROW_WISE"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("step 4:" in line for line in process.stderr)
        # The checkpoint of step 2 may still be written.
        checkpoints = CheckpointFolder(tmp_path / "out" / "checkpoint")
        wait_until(lambda: len(checkpoints.steps()) > 0)
    finally:
        process.kill()
    # The ranks write to the same pipe: its end says that they are gone.
    process.communicate(timeout=600)
    steps = checkpoints.steps()
    num_steps = steps[-1] + 4
    resumed = ("--resume", str(tmp_path / "out"), "--max-steps", str(num_steps))
    printed, said = run_on_ranks(2, train, "dlrm_dcnv2", *resumed)[0]
    assert f"step {steps[-1]}: goes on from its checkpoint" in said
    result = json.loads(printed.splitlines()[-1].removeprefix("RESULT "))
    assert (result["num_ranks"], result["num_steps"]) == (2, num_steps)


def test_a_failing_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    made_data.write_ml1m(tmp_path).write_text("")
    run = torchrun("ctr-ml1m", "--data", str(tmp_path), "--output", str(tmp_path / "out"))
    assert run.returncode != 0
    assert "RESULT" not in run.stdout
    assert "Traceback (most recent call last)" in run.stderr
