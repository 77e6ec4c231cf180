"""One launch of two ranks for the tests that ask little of them, since a launch costs seconds."""

import importlib.util
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks


def small_questions(device_type: str) -> dict[str, Any]:
    """On a rank: what the tests of each module compare."""
    from tests.integrations.torchrec import (
        test_dense_updates,
        test_features_dist,
        test_fused_layers,
        test_pipeline,
        test_pipeline_use,
        test_sharders,
        test_tables,
        test_united,
    )

    found = {"features_dist": test_features_dist.both(device_type)}
    found["united"] = test_united.everything(device_type)
    found["dense_updates"] = test_dense_updates.everything(device_type)
    found["fused_layers"] = test_fused_layers.everything(device_type)
    found["pipeline"] = test_pipeline.everything(device_type)
    if device_type == "cpu":
        found["tables"] = test_tables.everything()
        found["pipeline_use"] = test_pipeline_use.everything()
        found["sharders"] = test_sharders.everything()
    return found


@pytest.fixture(scope="session")
def answers(device: torch.device) -> list[dict[str, Any]]:
    """Those of each of two ranks."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and {torch.cuda.device_count()} is here")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    return run_on_ranks(2, small_questions, device.type, backend=backend)


@pytest.fixture(scope="session")
def cpu_answers(device: torch.device, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, of what is asked on the CPU alone."""
    if device.type == "cuda":
        pytest.skip("asks what FBGEMM does on the CPU")
    return answers
