"""Simulated steps: near those that were measured, and what is printed and drawn of them."""

from pathlib import Path

import pytest

from bench.planning.costs import RESULTS, stored_rows
from bench.simulate.__main__ import main
from bench.simulate.measured import MOST_SPREAD, comparisons
from bench.simulate.schedule import FITTED
from bench.simulate.step import Setting, simulated_step
from torchembed.sharding import H200


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_is_near_what_was_measured(num_gpus: int) -> None:
    rows = [
        row
        for row in stored_rows(RESULTS)
        if row.get("num_gpus") == num_gpus
        and row.get("batch_per_gpu") == 2048
        and row.get("system") == "torchembed"
    ]
    measured = comparisons(rows)
    assert len(measured) >= 2
    for each in measured:
        assert abs(each.ratio(FITTED) - 1) <= 0.1


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
    assert "longest stages" in printed[0]
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


def test_refuses_nodes_that_are_not_full() -> None:
    message = "^num_gpus must be a multiple of the 8 GPUs of a node, got 12$"
    with pytest.raises(ValueError, match=message):
        _ = Setting(hardware=H200, num_gpus=12).topology
