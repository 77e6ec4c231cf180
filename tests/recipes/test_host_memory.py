"""Runs with tables in host memory train as those with all tables on the device."""

from pathlib import Path

import pytest

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.host_memory import storages
from tests.support.small_recipes import lines_of_dlrm
from torchembed import HostMemory


@pytest.mark.parametrize("flags", [[], ["--dynamic", "--capacity", "0.5"]], ids=str)
def test_losses_are_those_of_tables_on_the_device(flags: list[str], tmp_path: Path) -> None:
    expected = lines_of_dlrm(tmp_path / "device", *flags)
    found = lines_of_dlrm(tmp_path / "host", *flags, "--cached", 0.3)
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
