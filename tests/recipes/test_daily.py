"""Training day after day: what the exports give is the model, also after a run that was killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.days import day_files
from recipes.dlrm_dcnv2.run import build_model, build_optimizers, open_split
from recipes.train import main, parse
from tests.support import made_data
from tests.support.small_recipes import SMALL_DLRM
from tests.support.tolerance import assert_same_bits
from tests.support.waiting import wait_until
from torchembed.checkpoints import load_deltas
from torchembed.data import Split
from torchembed.training import CheckpointFolder, TrainingRun, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = [*SMALL_DLRM, "--batch-size", "16", "--read-loss-every", "2", "--daily"]
DYNAMIC = ["--dynamic", "--capacity", "0.5"]


def write_day(folder: Path, day: int, num_rows: int = 80) -> None:
    """A day of 26 ids, of which some are the day's own."""
    generator = np.random.default_rng(day)
    lines = []
    for _ in range(num_rows):
        counts = [str(value) for value in generator.integers(0, 50, 13)]
        ids = [f"{value:08x}" for value in generator.integers(20 * day, 20 * day + 40, 26)]
        label = str(int(generator.random() < 0.4))
        lines.append("\t".join([label, *counts, *ids]) + "\n")
    (folder / f"day_{day}").write_text("".join(lines))


def write_days(folder: Path, num_days: int) -> Path:
    folder.mkdir()
    for day in range(num_days):
        write_day(folder, day)
    return folder


def made(arguments: list[str]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model of a run, untrained, and its optimizers."""
    config: DlrmConfig = parse(["dlrm_dcnv2", *arguments]).config
    model = build_model(config, open_split(config, Split.TRAIN), torch.device("cpu"))
    return model, build_optimizers(config, model)


def contents(model: nn.Module) -> dict[str, Any]:
    """Rows by id, rows that ids share, and all else."""
    tables: Any = model.get_submodule("embedding_bag_collection")
    found: dict[str, Any] = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and "embedding_bags" not in name
    }
    assert found
    if not tables.has_dynamic_tables:
        return found | {n: p for n, p in model.named_parameters() if "embedding_bags" in n}
    for name, of_table in tables.delta().tables.items():
        found[f"{name} shared"] = of_table.shared_rows
        for id_, row in zip(of_table.ids.tolist(), of_table.rows, strict=True):
            found[f"{name} {id_}"] = row
    return found


def assert_exports_are_the_model(output: Path, arguments: list[str]) -> dict[str, Any]:
    """The checkpoint's model, which the exports must give."""
    trained, optimizers = made(arguments)
    CheckpointFolder(output / "checkpoint").load(TrainingRun(model=trained, optimizers=optimizers))
    exported, _ = made(arguments)
    load_deltas(exported, output / "exports")
    expected, found = contents(trained), contents(exported)
    assert_equal(found, expected)
    return expected


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(found[name], value)


@pytest.mark.parametrize("flags", [DYNAMIC, []], ids=["dynamic", "static"])
def test_exports_of_days_are_the_model_and_new_days_are_trained(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_days(tmp_path / "data", 3), tmp_path / "run"
    arguments = [*SMALL, *flags, "--data", str(data), "--output", str(output)]
    main(["dlrm_dcnv2", *arguments])
    said = capsys.readouterr().err
    assert re.findall(r"(day_\d) trained.*export (\d) is (.*)", said) == [
        ("day_0", "0", "whole"),
        ("day_1", "1", "what has changed" if flags else "whole"),
    ]
    assert_exports_are_the_model(output, arguments)
    # The day that was held out is trained next, and is all that is.
    write_day(data, 3)
    main(["dlrm_dcnv2", "--resume", str(output)])
    said = capsys.readouterr().err
    assert re.findall(r"(day_\d) trained.*export (\d) is", said) == [("day_2", "2")]
    parts = assert_exports_are_the_model(output, arguments)
    whole = tmp_path / "whole"
    main(["dlrm_dcnv2", *arguments[:-1], str(whole)])
    assert_equal(parts, assert_exports_are_the_model(whole, arguments))
    points = [
        [(line["step"], line["validation_auc"]) for line in lines if "validation_auc" in line]
        for lines in (read_metrics(output), read_metrics(whole))
    ]
    assert [step for step, _ in points[0]] == [step for step, _ in points[1]] == [5, 10, 15]
    (data / "day_1").rename(data / "day_1.txt")
    with pytest.raises(ValueError, match=r"data must begin with the days .* \['day_0', 'day_1'"):
        main(["dlrm_dcnv2", "--resume", str(output)])


def test_a_run_that_was_killed_within_a_day_goes_on(tmp_path: Path) -> None:
    data, output = write_days(tmp_path / "data", 3), tmp_path / "run"
    arguments = [*SMALL, *DYNAMIC, "--data", str(data), "--checkpoint-every", "2"]
    command = [sys.executable, "-m", "recipes.train", "dlrm_dcnv2", *arguments]
    process = subprocess.Popen(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "day_0 trained" in line:
            break
    # The checkpoint of step 4, within the day, may still be written.
    checkpoints = CheckpointFolder(output / "checkpoint")
    wait_until(lambda: max(checkpoints.steps(), default=0) >= 4)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    assert 4 <= checkpoints.steps()[-1] <= 10
    main(["dlrm_dcnv2", "--resume", str(output)])
    parts = assert_exports_are_the_model(output, arguments)
    main(["dlrm_dcnv2", *arguments, "--output", str(tmp_path / "whole")])
    assert_equal(parts, assert_exports_are_the_model(tmp_path / "whole", arguments))


def test_what_cannot_be_trained_daily_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data must name a folder of days to be trained daily"):
        DlrmConfig(daily=True)
    wrong: list[tuple[str, Any]] = [("epochs", 2), ("evaluate_every", 5), ("mlperf_log", "open")]
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"{name} must be left out where days .* got {value}"):
            DlrmConfig(daily=True, data=tmp_path, **{name: value})
    write_day(tmp_path, 0)
    with pytest.raises(ValueError, match=r"at least two files to be trained daily.* with 1; add"):
        day_files(tmp_path)
    write_day(tmp_path, 1)
    assert day_files(tmp_path) == [tmp_path / "day_0"]
    mlperf = tmp_path / "mlperf"
    mlperf.mkdir()
    made_data.write_mlperf(mlperf, 5)
    with pytest.raises(ValueError, match="data must be days of text or Parquet files"):
        day_files(mlperf)
