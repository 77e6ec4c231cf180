"""The log of a tiny run has what the rules ask for, and passes the official checker."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.train import main
from tests.support.small_recipes import SMALL_DLRM

pytest.importorskip("mlperf_logging", reason="MLPerf's log is written by mlperf-logging")

# By the rules of training 4.1, 5.0 and 5.1 exactly one line each, of the closed division too.
ONCE = {
    "cache_clear": False,
    "init_start": None,
    "submission_benchmark": "dlrm_dcnv2",
    "submission_org": "us",
    "submission_division": "open",
    "submission_status": "onprem",
    "submission_platform": None,
    "seed": 0,
    "global_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "train_samples": 600,
    "eval_samples": 150,
    "opt_name": "adagrad",
    "opt_base_learning_rate": 0.02,
    "opt_adagrad_learning_rate_decay": 0,
    "opt_weight_decay": 0,
    "opt_adagrad_initial_accumulator_value": 0,
    "opt_adagrad_epsilon": 1e-8,
    "opt_learning_rate_warmup_steps": 3,
    "opt_learning_rate_decay_start_step": 4,
    "opt_learning_rate_decay_steps": 2,
    "init_stop": None,
    "run_start": None,
    "epoch_start": None,
    "epoch_stop": None,
    "run_stop": None,
}


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    main([
        "dlrm_dcnv2", "--output", str(folder), *SMALL_DLRM, "--mlperf-log", "open",
        "--mlperf-org", "us", "--click-log.num-train", "600", "--click-log.num-held-out", "300",
        "--batch-size", "128", "--evaluate-every", "2", "--warmup-steps", "3",
        "--decay-start-step", "4", "--decay-steps", "2", *arguments,
    ])  # fmt: skip
    lines = (folder / "mlperf.log").read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlperf")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[dict[str, Any]]:
    return run(folder)


def test_each_key_is_there_in_its_order(lines: list[dict[str, Any]]) -> None:
    of_evaluations = ["eval_start", "eval_accuracy", "eval_stop"]
    keys = [line["key"] for line in lines]
    assert [key for key in keys if key not in of_evaluations] == list(ONCE)
    evaluations = [key for key in keys if key in of_evaluations]
    assert evaluations == of_evaluations * 3
    assert keys.index("epoch_start") < keys.index("eval_start")
    assert keys.index("epoch_stop") == len(keys) - 2
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    for line in lines:
        end = line["key"].rpartition("_")[2]
        assert line["event_type"] == kinds.get(end, "POINT_IN_TIME"), line["key"]


def test_values_are_those_of_the_run(lines: list[dict[str, Any]]) -> None:
    by_key = {line["key"]: line["value"] for line in lines}
    for key, value in ONCE.items():
        assert value is None or by_key[key] == value, key
    assert by_key["submission_platform"].startswith("1x ")
    epochs = [line["metadata"]["epoch_num"] for line in lines if line["key"] == "eval_accuracy"]
    assert epochs == [0.4, 0.8, 1.0]
    assert all(0 <= line["value"] <= 1 for line in lines if line["key"] == "eval_accuracy")
    assert lines[-1]["metadata"]["status"] == "success"


def test_lines_name_the_place_in_the_recipe(lines: list[dict[str, Any]]) -> None:
    by_key = {line["key"]: Path(line["metadata"]["file"]).name for line in lines}
    assert {by_key[key] for key in ("cache_clear", "seed", "submission_org")} == {"run.py"}
    assert {by_key[key] for key in ("init_stop", "eval_accuracy", "run_stop")} == {"loop.py"}


def test_a_run_that_missed_its_target_was_aborted(tmp_path: Path) -> None:
    last = run(tmp_path / "missed", "--target-auc", "0.9999")[-1]
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "aborted")
    reached = run(tmp_path / "reached", "--target-auc", "0.01")
    assert reached[-1]["metadata"]["status"] == "success"
    assert [line["key"] for line in reached].count("eval_accuracy") == 1


@pytest.mark.parametrize("ruleset", ["4.1.0", "5.0.0", "5.1.0"])
def test_the_official_checker_passes_it(
    ruleset: str, lines: list[dict[str, Any]], folder: Path
) -> None:
    checker = ("-m", "mlperf_logging.compliance_checker", "--usage", "training")
    log = ("--log_output", str(folder / "checker.log"), str(folder / "mlperf.log"))
    checked = subprocess.run(
        [sys.executable, *checker, "--ruleset", ruleset, "--werror", *log],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stderr
