"""Simulated steps: near those that were measured, and what is printed and drawn of them."""

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from bench.planning.costs import RESULTS, stored_rows
from bench.simulate.__main__ import Config, main
from bench.simulate.measured import MOST_SPREAD, Comparison, comparisons, fitted, squares
from bench.simulate.schedule import FITTED, Engine, stage_of
from bench.simulate.step import Setting, simulated_step
from torchembed.sharding import H100, H200


@pytest.fixture(scope="module")
def measured() -> list[Comparison]:
    return comparisons(stored_rows(RESULTS))


# With 4 GPUs and 512 samples the host was late in each measurement.
@pytest.mark.parametrize(
    ("num_gpus", "batch_per_gpu"), [*product((1, 2), (512, 2048, 8192)), (4, 8192)]
)
def test_is_near_what_was_measured(
    measured: list[Comparison], num_gpus: int, batch_per_gpu: int
) -> None:
    ratios = [
        each.ratio(FITTED)
        for each in measured
        if (each.setting.num_gpus, each.setting.batch_per_gpu) == (num_gpus, batch_per_gpu)
    ]
    assert len(ratios) >= 2
    assert max(abs(ratio - 1) for ratio in ratios) <= 0.1


def test_fit_is_not_out_of_date(measured: list[Comparison]) -> None:
    """Where this fails after new measurements, ``--fit`` prints the numbers to store."""
    assert squares(measured, FITTED) <= 1.1 * squares(measured, fitted(measured))


def test_leaves_out_rows_of_late_hosts_and_other_systems() -> None:
    (row, *_) = [
        row
        for row in stored_rows(RESULTS)
        if row.get("system") == "torchembed" and row.get("batch_per_gpu") == 512
    ]
    late = row | {"ms_max": 2 * MOST_SPREAD * row["ms_min"]}
    other, tf32 = row | {"system": "torchrec"}, row | {"precision": "tf32"}
    unknown = row | {"gpu": "another"}
    assert comparisons([late, other, tf32, unknown]) == []


def test_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "steps.png"
    flags = ["--ids", "uniform", "--batch-per-gpu", "512", "--picture", str(picture)]
    main(["--gpus", "1", "2", "4", *flags])
    printed = capsys.readouterr().out.splitlines()
    assert "GiB  limit" in printed[0] and "longest stages" in printed[0]
    assert printed[1].split()[0] == "1" and "do not fit" in printed[1]
    assert [line.split()[0] for line in printed[2:4]] == ["2", "4"]
    assert "100%" in printed[2] and "100%" not in printed[3]
    assert printed[4] == f"picture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_vectors_in_8_bits_take_about_half_the_time_of_16() -> None:
    narrow, half = (
        {
            task.name: task.seconds
            for task in simulated_step(Setting(hardware=H200, num_gpus=4, wire=wire)).tasks
        }
        for wire in ("fp8", "bf16")
    )
    for name in ("vectors back", "gradients out"):
        # Each wire has a plan of its own, whose tables are not divided alike.
        assert 0.45 < narrow[name] / half[name] < 0.7


def test_meets_fewer_ranks_in_two_levels() -> None:
    of_nodes = Setting(hardware=H200, num_gpus=64).topology
    met = of_nodes.collective_seconds - 2 * H200.exchange_seconds
    assert met == pytest.approx((8 + 8) * H200.peer_seconds)
    for num_gpus, gpus_per_node in ((8, 8), (8, 1)):
        one_level = Setting(hardware=H200, num_gpus=num_gpus, gpus_per_node=gpus_per_node).topology
        met = one_level.collective_seconds - H200.exchange_seconds
        assert met == pytest.approx(8 * H200.peer_seconds)


def test_tables_batches_and_links_scale() -> None:
    """Twice the rows take twice the memory, twice the samples about twice the bytes of exchanges,
    and half the rate twice their time."""
    plain = Setting(hardware=H200, num_gpus=2, max_rows=1_000_000, batch_per_gpu=512)
    slow = dataclasses.replace(H200, intra_node_bandwidth=H200.intra_node_bandwidth / 2)

    def weights_and_bytes(setting: Setting) -> tuple[int, float]:
        tasks, report = simulated_step(setting)
        exchanged = [t.seconds - t.met_seconds for t in tasks if t.engine is Engine.WIRES]
        return sum(table.weight_bytes for table in report.tables), sum(exchanged)

    weights, seconds = weights_and_bytes(plain)
    larger = dataclasses.replace(plain, max_rows=2_000_000, row_factor=2)
    assert weights_and_bytes(larger)[0] == 2 * weights
    slower = weights_and_bytes(dataclasses.replace(plain, hardware=slow))[1]
    # Each setting has a plan of its own.
    assert slower == pytest.approx(2 * seconds, rel=0.2)


def test_averages_over_several_nodes_in_larger_buckets() -> None:
    for num_gpus, num_buckets, num_parts in ((8, 8, 4), (16, 2, 2)):
        setting = Setting(hardware=H200, num_gpus=num_gpus, max_rows=100_000)
        tasks, report = simulated_step(setting)
        assert report.dense is not None
        assert report.dense.num_buckets == num_buckets
        means = [task for task in tasks if stage_of(task.name) == "mean"]
        assert len(means) == num_parts
        # And one for replicated tables.
        met = 1.5 * setting.topology.collective_seconds * (num_buckets + 1)
        assert sum(task.met_seconds for task in means) == pytest.approx(met)


def test_ranks_meet_in_every_exchange_and_mean() -> None:
    tasks, report = simulated_step(Setting(hardware=H200, num_gpus=2, max_rows=100_000))
    free = dataclasses.replace(H200, exchange_seconds=0.0, peer_seconds=0.0)
    others = simulated_step(Setting(hardware=free, num_gpus=2, max_rows=100_000))
    assert others.report.plan == report.plan
    for task, other in zip(tasks, others.tasks, strict=True):
        assert task.seconds - task.met_seconds == pytest.approx(other.seconds, abs=1e-9)


@pytest.mark.parametrize(
    "name", ["row_factor", "batch_per_gpu", "intra_node_bandwidth", "inter_node_bandwidth"]
)
def test_refuses_sizes_and_rates_that_are_not_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be positive, got 0$"):
        dataclasses.replace(Config(), **{name: 0})


def test_takes_the_links_that_are_asked_for() -> None:
    gpu = Config(hardware="H100", inter_node_bandwidth=90e9).gpu
    assert gpu == dataclasses.replace(H100, inter_node_bandwidth=90e9)


def test_refuses_nodes_that_are_not_full() -> None:
    message = "^num_gpus must be a multiple of the 8 GPUs of a node, got 12$"
    with pytest.raises(ValueError, match=message):
        _ = Setting(hardware=H200, num_gpus=12).topology
