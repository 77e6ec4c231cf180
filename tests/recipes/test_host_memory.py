"""Runs with tables in host memory train as those with all tables on the device."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.host_memory import storages
from recipes.train import main
from tests.support.small_recipes import SMALL_DLRM
from torchembed import HostMemory


def lines_of(output: Path, *flags: object) -> list[dict[str, Any]]:
    """The metrics of a small run, less its times."""
    arguments = [
        "dlrm_dcnv2", "--output", output, *SMALL_DLRM, "--max-table-rows", 400,
        "--click-log.num-train", 400, "--click-log.num-held-out", 100, "--batch-size", 32,
        "--evaluate-every", 6, "--read-loss-every", 4, "--learning-rate", 0.05, *flags,
    ]  # fmt: skip
    main([str(argument) for argument in arguments])
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    measured = ("time", "samples_per_second")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]


@pytest.mark.parametrize("flags", [[], ["--dynamic", "--capacity", "0.5"]], ids=str)
def test_losses_are_those_of_tables_on_the_device(flags: list[str], tmp_path: Path) -> None:
    expected = lines_of(tmp_path / "device", *flags)
    found = lines_of(tmp_path / "host", *flags, "--cached", 0.3)
    name = "embedding_bag_collection.cache"
    assert all(line[f"{name}/batches_fetched_late"] == 0 for line in found if "loss" in line)
    without = [{k: v for k, v in line.items() if name not in k} for line in found]
    assert without == expected


def test_large_tables_alone_are_in_host_memory() -> None:
    assert storages([5, 100, 1000], None, 10) == [None] * 3
    assert storages([5, 20], 0.5, 10) == [None] * 2
    # A tenth of 1100 rows for two tables; and of 120, less than two batches.
    assert storages([5, 100, 1000], 0.1, 10) == [None, *[HostMemory(cache_rows=55)] * 2]
    assert storages([20, 21, 99], 0.1, 10) == [None, *[HostMemory(cache_rows=20)] * 2]
    # The small one has all of its rows, and the other one the rest.
    assert storages([30, 1000], 0.5, 10) == [HostMemory(cache_rows=485)] * 2
    assert storages([30, 1000], 1.0, 10) == [HostMemory(cache_rows=1000)] * 2


@pytest.mark.parametrize("cached", [0.0, -0.1, 1.5])
def test_refuses_what_is_no_part(cached: float) -> None:
    with pytest.raises(ValueError, match=f"cached must be above 0 and at most 1.* got {cached}"):
        DlrmConfig(cached=cached)
