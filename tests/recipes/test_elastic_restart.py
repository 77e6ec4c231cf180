"""``torchrun`` starts a run again after a rank or a node has died, and it goes on by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.dlrm_dcnv2.run import build_model, build_optimizers, open_split
from recipes.launch import check_restarts
from recipes.output import prepare_output
from recipes.train import main, parse
from tests.support.ranks import run_on_ranks
from torchembed.data import Split
from torchembed.training import CheckpointFolder, TrainingRun, read_metrics

ROOT = Path(__file__).resolve().parents[2]
RANK_DIES_AT, NODE_DIES_AT = 16, 32
"""Steps of the checkpoints in which they die."""
BETWEEN = 24
"""Step of the checkpoint that the ranks write which were started after the first death."""
SMALL = (
    *("--embedding-dim", "4", "--dense-arch", "8", "4", "--over-arch", "8", "1"),
    *("--num-cross-layers", "1", "--low-rank", "2", "--max-table-rows", "400"),
    *("--click-log.num-train", "2200", "--click-log.num-held-out", "300", "--epochs", "1000"),
    *("--batch-size", "128", "--evaluate-every", "4", "--checkpoint-every", "8"),
    *("--read-loss-every", "2", "--placement", "ROW_WISE"),
)
RENDEZVOUS = (
    *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
    *("--rdzv-backend", "c10d", "--rdzv-id", "a-job", "--rdzv-endpoint", "rendezvous"),
    # How long a second node is waited for, and after how many seconds a silent one counts as dead.
    "--rdzv-conf=store_type=file,last_call_timeout=15,keep_alive_interval=2,keep_alive_max_attempt=4",
    *("--local-addr", "localhost"),
)
TOGETHER = """
import sys, time
from pathlib import Path
from torch.distributed.run import main

folder = Path(sys.argv.pop(1))
(folder / f"node-{sys.argv.pop(1)}").touch()
while len(list(folder.glob("node-*"))) < 2:
    time.sleep(0.01)
main()
"""
"""Of a node: ``torchrun``, once both have imported it, which may take one of them much longer."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def start_node(folder: Path, number: int) -> subprocess.Popen[str]:
    """One of two nodes of a run that are started in ``folder``."""
    deaths = (str(folder), str(RANK_DIES_AT), str(NODE_DIES_AT))
    recipe = ("dlrm_dcnv2", *SMALL, "--max-steps", str(NODE_DIES_AT))
    run = (*("-c", TOGETHER, str(folder), str(number)), *RENDEZVOUS)
    return subprocess.Popen(
        [sys.executable, *run, "-m", "tests.recipes.dying_recipe", *deaths, *recipe],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measured(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics up to ``BETWEEN``, but for what is measured by the clock."""
    clock = ("time", "samples_per_second")
    lines = [line for line in read_metrics(output) if line["step"] <= BETWEEN]
    return [{key: value for key, value in line.items() if key not in clock} for line in lines]


def state_between(output: Path) -> dict[str, Any]:
    """Rows, dense weights and optimizer states of a run's checkpoint of ``BETWEEN``, by name."""
    config = parse(["dlrm_dcnv2", *SMALL]).config
    model = build_model(config, open_split(config, Split.TRAIN), torch.device("cpu"))
    run = TrainingRun(model=model, optimizers=build_optimizers(config, model))
    assert CheckpointFolder(output / "checkpoint").load(run, BETWEEN) == BETWEEN
    states = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(run.optimizers):
        for parameter, state in optimizer.state_dict()["state"].items():
            states |= {f"{number}.{parameter}.{name}": value for name, value in state.items()}
    return states


def test_a_run_goes_on_after_a_rank_and_after_a_node_was_killed(tmp_path: Path) -> None:
    """After the rank's death two ranks go on, and have what an uninterrupted run has, bit for bit;
    after the node's death one does, to the last step."""
    with start_node(tmp_path, 0) as first, start_node(tmp_path, 1) as second:
        ended = [process.communicate(timeout=800) for process in (first, second)]
    codes = [first.returncode, second.returncode]
    assert sorted(codes) == [-9, 0], ended
    printed, said = ended[codes.index(0)]
    for died_at in (RANK_DIES_AT, NODE_DIES_AT):
        assert any(f"step {died_at - 8}: goes on from its" in said for _, said in ended), ended
    result = json.loads(printed.splitlines()[-1].removeprefix("RESULT "))
    assert (result["num_ranks"], result["num_steps"]) == (1, NODE_DIES_AT), said
    (output,) = (tmp_path / "runs").iterdir()
    assert CheckpointFolder(output / "checkpoint").steps() == [BETWEEN, NODE_DIES_AT]
    whole = tmp_path / "whole"
    to_there = ("--max-steps", str(BETWEEN), "--output", str(whole))
    run_on_ranks(2, main, ["dlrm_dcnv2", *SMALL, *to_there])
    assert measured(output) == measured(whole)
    assert len(measured(whole)) >= BETWEEN // 2 + BETWEEN // 4
    found, wanted = state_between(output), state_between(whole)
    assert found.keys() == wanted.keys()
    assert any(name.startswith("1.") for name in wanted)
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def set_launch(monkeypatch: pytest.MonkeyPatch, run_id: str, **others: str) -> None:
    """Set what ``torchrun`` sets for its processes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    for name, value in others.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)


def test_a_launch_goes_on_in_its_own_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    set_launch(monkeypatch, "first")
    times = iter(("2", "1", "3", "4"))
    monkeypatch.setattr("recipes.output.time.strftime", lambda _: next(times))
    first = prepare_output(None, "din", ["--seed", "1"])
    assert first == tmp_path / "runs" / "din-2"
    # The same launch with other arguments is another run, and so is the same command elsewhere.
    assert prepare_output(None, "din", ["--seed", "2"]).name == "din-1"
    assert prepare_output(None, "din", ["--seed", "1"]) == first
    assert prepare_output(first, "din", ["--seed", "1"]) == first
    for run_id in ("second", "none"):
        set_launch(monkeypatch, run_id)
        with pytest.raises(FileExistsError, match=r"din-2 holds files already; name another with"):
            prepare_output(first, "din", ["--seed", "1"])
        assert prepare_output(None, "din", ["--seed", "1"]).name == f"din-{3 + (run_id == 'none')}"


def test_restarts_that_could_not_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_restarts()
    set_launch(monkeypatch, "none", MAX_RESTARTS="2", USE_AGENT_STORE="True")
    with pytest.raises(RuntimeError, match=r"got 2 and one store for all; set TORCH_DISABLE_SHARE"):
        check_restarts()
    set_launch(monkeypatch, "none", USE_AGENT_STORE="False")
    with pytest.raises(RuntimeError, match=r"got 2 and none; give torchrun --standalone, or the"):
        check_restarts()
    set_launch(monkeypatch, "none", MAX_RESTARTS="0", USE_AGENT_STORE="True")
    check_restarts()
    set_launch(monkeypatch, "a-job", MAX_RESTARTS="2", USE_AGENT_STORE="False")
    check_restarts()
