"""Recipes read the data behind a URL as they read that of a folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("upath", reason="URLs are read with universal-pathlib")

from recipes.ctr import frappe, ml1m
from recipes.data_folder import find_data
from recipes.dlrm_dcnv2.days import day_files
from recipes.train import main, parse
from tests.support import made_data, reading
from tests.support.object_stores import folder_of_url, upload


@pytest.fixture
def url() -> Iterator[str]:
    with folder_of_url("memory") as url:
        yield url


def test_the_recipe_is_that_of_the_files(tmp_path: Path, url: str) -> None:
    upload(made_data.write_mlperf(tmp_path, num_rows=10), url)
    config = parse(["dlrm_dcnv2", "--data", url]).config
    assert config.data == url
    assert config.target_auc == parse(["dlrm_dcnv2.mlperf"]).config.target_auc
    with pytest.raises(ValueError, match=rf"and {url} holds MLPerf's files"):
        day_files(url)
    with pytest.raises(SystemExit, match=f"--data names {url}/x, and there is no such file"):
        main(["dlrm_dcnv2", "--data", f"{url}/x"])


def test_days_are_found(tmp_path: Path, url: str) -> None:
    for day in range(3):
        rows = reading.as_text(reading.random_rows(2, seed=day))
        (tmp_path / f"day_{day}").write_text(rows)
    upload(tmp_path, url)
    assert [str(path) for path in day_files(url)] == [f"{url}/day_0", f"{url}/day_1"]


@pytest.mark.parametrize("recipe", [frappe, ml1m])
def test_small_data_is_read(tmp_path: Path, url: str, recipe: type[frappe] | type[ml1m]) -> None:
    write = made_data.write_frappe if recipe is frappe else made_data.write_ml1m
    write(tmp_path)
    places = (tmp_path, upload(tmp_path, url))
    both = [recipe.read(find_data(recipe.FILES, data)) for data in places]
    local, remote = (rows.rows if recipe is frappe else rows for rows in both)
    assert torch.equal(local.labels, remote.labels)
    assert local.features.keys() == remote.features.keys()
    for name, feature in local.features.items():
        for part, tensor in vars(feature).items():
            assert torch.equal(tensor, getattr(remote.features[name], part)), (name, part)
