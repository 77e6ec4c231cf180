"""A run is deployed, served and asked by the command that ``make serve`` starts."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.dlrm_dcnv2.run import build_model, open_split
from recipes.live.view import Totals, freshness, hit_rate
from recipes.output import earlier_arguments
from recipes.train import parse
from tests.support.small_recipes import lines_of_dlrm
from tests.support.source_tree import ROOT
from torchembed.data import Split
from torchembed.training import CheckpointFolder, TrainingRun

pytest.importorskip("uvicorn")


def test_the_newest_run_is_served_asked_and_trained_on(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "dlrm_dcnv2-20260101-000000"
    lines_of_dlrm(run, "--max-steps", 4)
    command = [sys.executable, "-m", "recipes.serve", "dlrm_dcnv2"]
    command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--live"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        printed = ""
        for printed in process.stdout:
            if printed.strip().startswith("curl"):
                break
        curl, silent, url, flag, file = shlex.split(printed)
        assert (curl, silent, flag, file[0]) == ("curl", "-s", "-d", "@")
        request = (tmp_path / file[1:]).read_bytes()
        with urllib.request.urlopen(url, data=request, timeout=60) as response:
            answer = json.load(response)
        lines = (line for line in process.stdout if "fresh within" in line)
        followed = next(line for line in lines if "fresh within -" not in line)
        assert re.search(r"version +(\d+)", followed)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0
    assert (tmp_path / "runs" / "serving" / "live.png").stat().st_size > 0
    assert (answer["model_name"], answer["model_version"]) == ("dlrm_dcnv2", "4")
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    np.testing.assert_allclose(found["click"], probabilities(run), atol=1e-6)
    assert found["default_rows"] == [0, 0]


def probabilities(run: Path) -> np.ndarray:
    """Those of the first two validation rows, by the model of the run's checkpoint."""
    config = parse(["dlrm_dcnv2", *earlier_arguments(run, "dlrm_dcnv2")]).config
    rows = open_split(config, Split.VALIDATION)
    model = build_model(config, rows, torch.device("cpu"))
    CheckpointFolder(run / "checkpoint").load(TrainingRun(model=model), 4)
    dense, sparse, _ = next(iter(rows))
    with torch.no_grad():
        return model.eval()(dense, sparse).sigmoid().flatten()[:2].numpy()


def totals(ages: dict[float, float], hits: float = 0.0, misses: float = 0.0) -> Totals:
    return Totals(ages=ages, num_rows=0.0, hits=hits, misses=misses)


def test_freshness_and_hit_rate_are_of_what_came_between() -> None:
    before = totals({0.1: 90.0, 1.0: 100.0, math.inf: 100.0}, hits=10.0, misses=10.0)
    after = totals({0.1: 188.0, 1.0: 199.0, math.inf: 200.0}, hits=40.0, misses=20.0)
    assert freshness(before, before) is None and hit_rate(before, before) == 0.0
    # 98 of 100 within 0.1 s, 99 within 1 s, and one later.
    assert [freshness(before, after, share) for share in (0.98, 0.99, 1.0)] == [0.1, 1.0, math.inf]
    assert hit_rate(before, after) == 0.75
