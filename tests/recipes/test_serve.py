"""A run is deployed, served and asked by the command that ``make serve`` starts."""

import json
import os
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
from recipes.output import earlier_arguments
from recipes.train import parse
from tests.support.small_recipes import lines_of_dlrm
from tests.support.source_tree import ROOT
from torchembed.data import Split
from torchembed.training import CheckpointFolder, TrainingRun

pytest.importorskip("uvicorn")


def test_the_newest_run_is_served_and_the_printed_command_asks_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "dlrm_dcnv2-20260101-000000"
    lines_of_dlrm(run, "--max-steps", 4)
    command = [sys.executable, "-m", "recipes.serve", "dlrm_dcnv2"]
    command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
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
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
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
