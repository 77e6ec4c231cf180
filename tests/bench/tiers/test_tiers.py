"""``bench.tiers`` on a CPU: its figures are of losses that were compared."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bench.tiers import __main__ as tiers
from bench.tiers import tables
from bench.tiers.disk import measured_disk_rates
from bench.tiers.link import measured_rates
from torchembed.tables import Storage

CPU = torch.device("cpu")
CONFIG = tiers.Config(
    batch_sizes=(4,), ids=("uniform",), parts=(0.8,), systems=("device", "host"), max_rows=1000,
    num_checked=1, num_warm_up=2, num_repeats=1, steps=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "measured_rates", lambda device: measured_rates(device, 2**16))
    monkeypatch.setattr(
        tiers, "measured_disk_rates", lambda folder: measured_disk_rates(folder, 2**22, 1)
    )


def test_a_figure_is_there_only_where_losses_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tiers.json"
    tiers.Bench(dataclasses.replace(CONFIG, output=output), CPU).run()
    device, host = json.loads(output.read_text())["rows"]
    assert (device["system"], host["system"], host["part"]) == ("device", "host", 0.8)
    assert device["losses"] == host["losses"]
    assert host["loss_error"] == 0
    assert host["times_device"] == host["ms_median"] / device["ms_median"]
    assert 0 < host["hit_rate"] < 1
    # A row of 128 float32 numbers, and that of row-wise Adagrad.
    assert host["bytes_read_per_step"] * 2 % 516 == 0
    assert host["bytes_read_per_step"] > 0
    assert host["link_fraction"] > 0
    assert f"{host['ms_median']:.3f} (" in capsys.readouterr().out

    class AtAnotherRate(tables.TorchembedTables):
        def __init__(self, setting: tables.TierSetting, storage: Storage | None) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(tables, "LR", 0.01 if storage else 0.005)
                super().__init__(setting, storage)

    monkeypatch.setattr(tiers, "TorchembedTables", AtAnotherRate)
    bench = tiers.Bench(CONFIG, CPU)
    bench.run()
    assert "ms_median" in bench.rows[0] and "ms_median" not in bench.rows[1]
    assert "not printed: losses [" in capsys.readouterr().out


def test_tables_on_disk_train_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(
        CONFIG, batch_sizes=(2,), parts=(0.1,), systems=("device", "disk"),
        disk=tmp_path / "rows", host_times=1.5, num_warm_up=16, steps=8,
    )  # fmt: skip
    bench = tiers.Bench(config, CPU)
    bench.run()
    device, disk = bench.rows
    assert (disk["system"], disk["host_times"]) == ("disk", 1.5)
    assert disk["losses"] == device["losses"]
    # Whole lines of a row of 128 numbers and of row-wise Adagrad's.
    for moved in ("disk_bytes_read_per_step", "disk_bytes_written_per_step"):
        assert disk[moved] > 0 and disk[moved] * 8 % 516 == 0
    assert disk["hit_rate"] < disk["host_hit_rate"] < 1
    assert disk["disk_fraction"] > 0 and min(disk["disk"].values()) > 0
    out = capsys.readouterr().out
    assert "the disk reads " in out and f"{disk['ms_median']:.3f} (" in out
    # Without a folder nothing is written.
    bench = tiers.Bench(dataclasses.replace(config, disk=None), CPU)
    bench.run()
    assert [row["system"] for row in bench.rows] == ["device"]


# FBGEMM's build for CPUs warns of what it lacks.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="needs FBGEMM")
def test_fbgemms_tables_are_the_same() -> None:
    systems = ("device", "fbgemm_host", "fbgemm_managed")
    bench = tiers.Bench(dataclasses.replace(CONFIG, systems=systems), CPU)
    bench.run()
    device, host = bench.rows  # managed memory needs a GPU
    assert 0 <= host["loss_error"] <= tiers.FBGEMM_TOLERANCE
    assert host["times_device"] > 0
    assert device["losses"][0] != device["losses"][1]


def test_a_batch_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bench = tiers.Bench(dataclasses.replace(CONFIG, parts=(0.01,)), CPU)
    bench.run()
    assert "share a cache of" in bench.rows[1]["not_printed_because"]
    assert "not printed: RuntimeError: tables cat_0, " in capsys.readouterr().out


def test_the_parts_of_tables_add_up() -> None:
    assert tables.cache_rows([3, 100, 1000], 1.0) == 1000
    assert tables.cache_rows([3, 100, 1000], 0.1) == 54  # 3 + 54 + 54 of 1103
    assert tables.cache_rows([5], 0.01) == 1
