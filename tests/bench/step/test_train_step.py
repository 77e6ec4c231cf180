"""``bench.step.train_step`` on one process: what it prints was checked against plain PyTorch."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.planning.step_floor import RATES, floor_seconds, num_unique_rows
from bench.step import reference_step, torchembed_step, train_step
from bench.step.reference_step import expected_losses
from bench.step.setting import StepSetting
from bench.step.table import print_profile
from bench.step.torchembed_step import TorchembedStep
from tests.support.small_dense_part import shrink_dense_part
from tests.support.tolerance import relative_error
from torchembed.modules import use_float8_products

CONFIG = train_step.Config(
    batch_sizes=(16,), ids=("zipf",), systems=("torchembed_tf32",), max_rows=100,
    num_batches=2, num_repeats=1, seconds=0.0,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_dense_part(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_dense_part(monkeypatch)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_figure_is_there_only_where_losses_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_step, "NUM_PASSES", 1)
    output = tmp_path / "steps.json"
    others = ("torchembed_dynamic", "torchembed_bf16_rows", "torchembed_fp8_products")
    systems = (*CONFIG.systems, *others)
    of_narrow = functools.partial(use_float8_products, least_width=16)
    for module in (reference_step, torchembed_step):
        monkeypatch.setattr(module, "use_float8_products", of_narrow)
    train_step.Bench(dataclasses.replace(CONFIG, output=output, systems=systems), CPU).run()
    row, *of_others = json.loads(output.read_text())["rows"]
    assert [(each["precision"], each["rows"]) for each in of_others] == [
        ("bf16", "fp32"), ("bf16", "bf16"), ("fp8", "fp32"),
    ]  # fmt: skip
    for each in of_others:
        assert 0 < each["loss_error"] <= each["loss_tolerance"]
        assert each["ms_median"] > 0
    assert {key: row[key] for key in ("system", "num_gpus", "ids", "precision", "wire")} == {
        "system": "torchembed_tf32", "num_gpus": 0, "ids": "zipf", "precision": "tf32",
        "wire": "fp32",
    }  # fmt: skip
    assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
    assert row["samples_per_second"] == pytest.approx(
        16e3 / row["ms_median"], rel=relative_error(2, torch.float64), abs=0
    )
    # How many depends on how busy the machine is; a test of the pipeline has a clock of its own.
    assert isinstance(row["input_stalls"], int)
    assert 0 < row["loss_error"] <= row["loss_tolerance"] < 1e-2
    assert f"{row['ms_median']:.3f} (" in capsys.readouterr().out

    def at_another_rate(setting: StepSetting, _: object) -> TorchembedStep:
        return TorchembedStep(dataclasses.replace(setting, lr=0.8 * setting.lr))

    monkeypatch.setattr(train_step, "TorchembedStep", at_another_rate)
    bench = train_step.Bench(CONFIG, CPU)
    bench.run()
    assert "ms_median" not in bench.rows[0]
    assert "not printed: losses [" in capsys.readouterr().out

    train_step.Bench(dataclasses.replace(CONFIG, budget_seconds=1e-9), CPU).run()
    assert capsys.readouterr().out == "   16 zipf     left out, the budget is spent\n"


def test_profiles_are_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "batch_per_gpu": 512, "ids": "zipf", "system": "torchembed", "gpu_busy_ms": 0.4375,
        "kernels": 112.0, "launches": 1.0, "host_waits": 0.0,
    }  # fmt: skip
    print_profile(row, is_first=True)
    stages = {"alone_ms": {"ids": 0.25, "mean": 0.0}, "predicted_ms": {"ids": 0.125}}
    print_profile(row | stages, is_first=False)
    print_profile(row | {"not_profiled_because": "RuntimeError: memory"}, is_first=False)
    line = "  512 zipf     torchembed                 0.438      112         1    0.0"
    assert capsys.readouterr().out.splitlines() == [
        "batch ids      system                   busy ms  kernels  launches  waits",
        line,
        line,
        "               ms one after the other (predicted): ids 0.250 (0.125)",
        "  512 zipf     torchembed             not profiled: RuntimeError: memory",
    ]


def test_the_reference_trains_the_ranks_samples_together() -> None:
    setting = StepSetting(
        batch_size=8, ids="uniform", optimizer="sgd", precision="fp32", wire="fp32", max_rows=9,
        device=CPU,
    )  # fmt: skip
    rounded = setting.precisions._replace(wire="bf16")
    both = train_step.workload.make_batch("uniform", 8, 9, 0)
    halves = [train_step.workload.make_batch("uniform", 4, 9, number) for number in range(2)]
    assert num_unique_rows([both], CPU) <= sum(train_step.workload.table_sizes(9))
    found = expected_losses(setting, [halves] * 2, [setting.precisions, rounded])
    assert [len(of_ranks) for of_ranks in found.losses] == [2, 2]
    assert sum(found.losses[1]) < sum(found.losses[0])
    assert 0 < found.tolerance[setting.precisions] < 1e-4
    assert found.tolerance[setting.precisions] < found.tolerance[rounded] < 0.1


def test_the_floor_by_hand() -> None:
    seconds = floor_seconds(
        RATES["H100"], 1000, 1, 50_000, optimizer="sgd", precision="fp32", wire="fp32"
    )
    rows, vectors = 50_000 * 512, 1000 * 26 * 128 * 4
    dense = max(1000 * 96.2e6 / 395e12, 3 * 16.04e6 * 4 / 3e12)
    memory = rows + vectors + 2 * rows + vectors + 16.04e6 * (8 + 4)
    # Sums and products of positive numbers, of fewer roundings than that on both sides.
    expected = dense + memory / 3e12
    assert seconds == pytest.approx(expected, rel=relative_error(64, torch.float64), abs=0)
