"""State dicts have TorchRec's names and forms, and either side loads what the other saved."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.torchrec_states import described, whole_state

BEFORE, AFTER = ["table_wise", "column_wise"], ["row_wise", "table_wise"]
"""Placements of tables where a checkpoint is saved, and where it is loaded."""


def make(whose: str, placements: list[str], *, as_dtensors: bool = False) -> Any:
    from torchrec.distributed.types import ShardingEnv

    from tests.support.torchrec_training import make_run

    return make_run(
        whose,
        torch.device("cpu"),
        placements,
        torch.optim.Adagrad,
        {"lr": 0.02, "eps": 1e-6},
        env=ShardingEnv(
            dist.get_world_size(), dist.get_rank(), dist.group.WORLD, output_dtensor=as_dtensors
        ),
    )


def state_of(run: Any) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.model.fused_optimizer.state_dict()}


def everything_on_the_cpu() -> dict[str, list[float]]:
    """On a rank: what :func:`across` gives for a folder of the first one."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        losses = across(folders[0])
        dist.barrier()
    return losses


def across(folder: str) -> dict[str, list[float]]:
    """On a rank: the losses that follow a checkpoint, by who saved and who loaded it."""
    import torch.distributed.checkpoint as dcp

    losses: dict[str, list[float]] = {}
    states = {}
    for saver in ("theirs", "ours"):
        saved = make(saver, BEFORE)
        saved.steps(0, 4)
        states[saver] = described(state_of(saved))
        dcp.save(state_of(saved), checkpoint_id=str(Path(folder) / saver))  # type: ignore[attr-defined]
        for loader in ("theirs", "ours"):
            loaded = make(loader, AFTER)
            loaded.steps(9, 10)  # state that must go
            state = state_of(loaded)
            dcp.load(state, checkpoint_id=str(Path(folder) / saver))  # type: ignore[attr-defined]
            loaded.model.load_state_dict(state["model"])
            loaded.model.fused_optimizer.load_state_dict(state["optimizer"])
            for part in ("model", "optimizer"):
                mine, its = state_of(loaded)[part], state_of(saved)[part]
                assert whole_state(mine) == whole_state(its), (saver, loader, part)
            losses[f"{saver} to {loader}"] = loaded.steps(4, 8)
        losses[f"{saver} on"] = saved.steps(4, 8)
    assert states["theirs"] == states["ours"]
    as_dtensors = [
        described(state_of(make(w, BEFORE, as_dtensors=True))) for w in ("theirs", "ours")
    ]
    assert as_dtensors[0] == as_dtensors[1]
    assert "DTensor" in str(as_dtensors[0])
    assert "DTensor" not in str(states)
    return losses


def test_either_side_loads_the_others_checkpoints(cpu_answers: list[dict[str, Any]]) -> None:
    for of_rank in cpu_answers:
        losses: dict[str, list[float]] = of_rank["checkpoints"]
        expected, theirs = losses["theirs on"], losses["theirs to theirs"]
        drift = 3 * max(abs(a - b) for a, b in zip(expected, theirs, strict=True))
        for name, found in losses.items():
            rounding = torch.finfo(torch.float32).eps
            assert found == pytest.approx(expected, abs=drift + rounding, rel=0), name
