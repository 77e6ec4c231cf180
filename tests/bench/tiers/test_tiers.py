"""``bench.tiers`` on a CPU: its figures are of losses that were compared."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bench.step.reference_step import Expected
from bench.tiers import __main__ as tiers
from bench.tiers import losses, storages
from bench.tiers.disk import measured_disk_rates
from bench.tiers.disk_room import check_disk
from bench.tiers.link import measured_rates
from bench.tiers.setting import TierSetting, make_setting
from bench.tiers.training import TorchembedTraining
from tests.support.small_dense_part import shrink_dense_part
from torchembed import HostMemory

CPU = torch.device("cpu")
CONFIG = tiers.Config(
    model="tables", batch_sizes=(4,), ids=("uniform",), parts=(0.8,), systems=("device", "host"),
    max_rows=1000, num_checked=1, num_warm_up=2, num_repeats=1, steps=2,
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
    assert (device["loss_error"], host["loss_error"]) == (None, 0)
    assert (host["model"], host["optimizer"], host["rows"]) == ("tables", "rowwise_adagrad", "new")
    assert host["times_device"] == host["ms_median"] / device["ms_median"]
    assert 0 < host["hit_rate"] < 1
    # A row of 128 float32 numbers, and that of row-wise Adagrad.
    assert host["bytes_read_per_step"] * 2 % 516 == 0
    assert host["bytes_read_per_step"] > 0
    assert host["link_fraction"] > 0
    assert f"{host['ms_median']:.3f} (" in capsys.readouterr().out

    class AtAnotherRate(TorchembedTraining):
        def __init__(self, setting: TierSetting, storages: storages.Storages) -> None:
            lr = 0.005 if storages["cat_0"] is None else 0.01
            super().__init__(dataclasses.replace(setting, lr=lr), storages)

    monkeypatch.setattr(tiers, "TorchembedTraining", AtAnotherRate)
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
    assert 0 <= host["loss_error"] <= losses.FBGEMM_TOLERANCE
    assert host["times_device"] > 0
    assert device["losses"][0] != device["losses"][1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_whole_model_is_trained_wherever_its_tables_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink_dense_part(monkeypatch)
    systems = ("device", "host", "planned", "fbgemm_host")
    config = dataclasses.replace(
        CONFIG, model="dlrm", optimizer="adagrad", systems=systems, parts=(1.0,),
        device_bytes=11e6, host_bytes=11e6, num_fill=1,
    )  # fmt: skip
    bench = tiers.Bench(config, CPU)
    bench.run()
    device, new, known, planned, *of_fbgemm = bench.rows
    assert 0 < device["loss_error"] < 0.01  # of its bfloat16
    # All rows of a batch that came before are in a cache of all rows.
    assert (new["rows"], known["rows"], planned["rows"]) == ("new", "known", "new")
    assert new["hit_rate"] < known["hit_rate"] == 1
    assert 0 < new["cached_rows"] <= known["cached_rows"] < known["cache_rows"]
    assert known["bytes_read_per_step"] == 0 < new["bytes_read_per_step"]
    assert new["loss_error"] == planned["loss_error"] == 0
    assert planned["bytes_read_per_step"] > 0
    assert (planned["device_bytes"], planned["host_bytes"]) == (11e6, 11e6)
    out = capsys.readouterr().out
    assert "rows cached" in out and "predicted: " in out
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        assert 0 < of_fbgemm[0]["loss_error"] < 0.01


def test_losses_are_right_within_what_rounding_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make_setting(
        "dlrm", batch_size=4, ids="zipf", optimizer="adagrad", max_rows=9, device=CPU
    )
    ours = setting.precisions
    tolerance = {ours: 0.25, ours._replace(wire="fp32"): 0.125}
    true = Expected([[1.0], [0.5]], tolerance)
    monkeypatch.setattr(losses, "expected_losses", lambda *_: true)
    expected = losses.ExpectedLosses(setting, [])
    assert expected.error([1.0, 0.75], is_fbgemm=False) == (0.25, None)
    error, problem = expected.error([1.0, 0.75], is_fbgemm=True)
    assert error == 0.25 and problem is not None
    assert problem == ("losses [1.0, 0.75] are up to 2.50e-01 > 1.25e-01 from [1.0, 0.5]")
    expected.on_device = [1.0, 0.625]
    assert expected.error([1.0, 0.625], is_fbgemm=False) == (0.0, None)
    error, problem = expected.error([1.0, 0.5], is_fbgemm=False)
    assert error == 0.125 and problem is not None and "> 0.00e+00 from" in problem
    assert expected.error([1.0, 0.5], is_fbgemm=True) == (0.0, None)
    error, problem = expected.error([float("nan"), 0.5], is_fbgemm=True)
    assert problem is not None


def test_a_planner_divides_tables_over_device_and_host() -> None:
    setting = make_setting(
        "dlrm", batch_size=2048, ids="zipf", optimizer="rowwise_adagrad", max_rows=40_000_000,
        device=CPU,
    )  # fmt: skip
    report = storages.plan_of(setting, 40e9, 120e9)
    where = storages.planned(report)
    assert list(where) == list(storages.on_device(setting))
    in_host = {name for name, storage in where.items() if isinstance(storage, HostMemory)}
    # Of the five of 40 M rows, at most two fit beside caches of the others.
    assert len(in_host & {"cat_0", "cat_9", "cat_19", "cat_20", "cat_21"}) >= 3
    with pytest.raises(ValueError, match="GiB"):
        storages.plan_of(setting, 40e9, 40e9)


def test_a_batch_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bench = tiers.Bench(dataclasses.replace(CONFIG, parts=(0.01,)), CPU)
    bench.run()
    assert "share a cache of" in bench.rows[1]["not_printed_because"]
    assert "not printed: RuntimeError: tables cat_0, " in capsys.readouterr().out


def test_what_a_disk_has_no_room_for_is_said_before_rows_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(CONFIG, systems=("disk",), disk=tmp_path / "rows", parts=(0.01,))
    monkeypatch.setattr(tiers, "TorchembedTraining", None)  # nothing is to be made
    bench = tiers.Bench(config, CPU)
    bench.run()
    (row,) = bench.rows
    assert "parts must give room for the" in row["not_printed_because"]
    assert not list((tmp_path / "rows").iterdir())
    bench = tiers.Bench(dataclasses.replace(config, parts=(0.2,), host_times=1.0), CPU)
    bench.run()
    assert "raise --host-times" in bench.rows[0]["not_printed_because"]
    capsys.readouterr()
    with pytest.raises(OSError, match=r"where .* GB are free, and \d+ rows of 1024 bytes take"):
        check_disk(tmp_path, "adagrad", 10**15)
    with pytest.raises(FileNotFoundError, match=r"--disk must be a folder, .* got .*/b; make .*/a"):
        check_disk(tmp_path / "a" / "b", "adagrad", 10)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("systems", ("device", "tape"), "systems must be of device, host, .*, got tape"),
        ("ids", ("zipf", "same"), "ids must be of .*, got same"),
        ("parts", (0.0,), "parts must be above 0 and at most 1, got"),
        ("host_times", 0.5, "host_times must be at least 1, got 0.5"),
        ("steps", 0, "steps must be at least 1, got 0"),
        ("batch_sizes", (0,), "batch_sizes must be at least 1, got"),
    ],
)
def test_settings_that_cannot_be_measured(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_the_parts_of_tables_add_up() -> None:
    assert storages.cache_rows([3, 100, 1000], 1.0) == 1000
    assert storages.cache_rows([3, 100, 1000], 0.1) == 54  # 3 + 54 + 54 of 1103
    assert storages.cache_rows([5], 0.01) == 1
