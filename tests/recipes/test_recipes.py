"""Each recipe's tiny config runs from its command line to its last line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.run import open_split
from recipes.train import main, parse
from tests.support import made_data
from tests.support.small_recipes import SMALL_CTR, SMALL_DLRM
from torchembed.data import MISSING_ID, MLPERF_TABLE_SIZES, Split


def result_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    """Run a recipe in this process; what its last line says."""
    main([str(argument) for argument in arguments])
    last = capsys.readouterr().out.splitlines()[-1]
    word, _, text = last.partition(" ")
    assert word == "RESULT"
    result = json.loads(text)
    assert result["num_ranks"] == 1
    assert result["num_steps"] > 0
    assert result["samples_per_second"] > 0
    assert result["seconds"] > 0
    assert 0 <= result["test_auc"] <= 1
    assert 0 < result["test_logloss"] < 5
    assert len(list(Path(result["checkpoint"]).glob("step-*/complete.json"))) == 1
    return result


def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    result = result_of(
        capsys, "dlrm_dcnv2", "--output", output, *SMALL_DLRM,
        "--click-log.num-train", 600, "--click-log.num-held-out", 300,
        "--batch-size", 128, "--evaluate-every", 2, "--read-loss-every", 2,
    )  # fmt: skip
    assert result["num_steps"] == math.ceil(600 / 128)
    assert 0.6 < result["bayes_auc"] <= 1
    # Better than guessing one half each time.
    assert 0 < result["bayes_logloss"] < math.log(2)
    assert result["checkpoint"] == str(output / "checkpoint")
    assert (output / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "low_rank = 2\n" in (output / "config.txt").read_text()


@pytest.mark.parametrize("recipe", ["dlrm_dcnv2", "dlrm_dcnv2.criteo_kaggle"])
def test_criteo_text(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = made_data.write_criteo_text(tmp_path)
    result = result_of(
        capsys, recipe, "--data", data, "--output", tmp_path / "out", *SMALL_DLRM,
        "--batch-size", 32, "--epochs", 3, "--max-steps", 150, "--learning-rate", 0.02,
    )  # fmt: skip
    assert result["num_steps"] == 150
    assert result["test_auc"] > 0.9
    assert "bayes_auc" not in result
    assert "bayes_logloss" not in result


@pytest.mark.parametrize("data", ["made log", "text", "days"])
def test_dlrm_of_raw_ids(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In static tables, in dynamic ones with room for all ids, and in such that evict."""
    arguments: list[Any] = [*SMALL_DLRM, "--batch-size", 32, "--learning-rate", 0.02]
    if data == "made log":
        arguments += ["--click-log.num-train", 600, "--click-log.num-held-out", 300]
    else:
        write = made_data.write_criteo_text if data == "text" else made_data.write_mlperf
        arguments += ["--data", write(tmp_path), "--max-steps", 20]
    found = []
    for number, flags in enumerate(([], ["--dynamic"], ["--dynamic", "--capacity", 0.3])):
        output = tmp_path / f"out-{number}"
        result = result_of(capsys, "dlrm_dcnv2", "--output", output, *arguments, *flags)
        found.append(result["test_logloss"])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_dynamic_tables_get_the_ids_of_the_data(is_dynamic: bool, tmp_path: Path) -> None:
    """Tables of 30 rows, and of 3 with a capacity of 0.1; a feature of the text has no ids."""
    text = made_data.write_criteo_text(tmp_path)
    days = tmp_path / "days"
    days.mkdir()
    made_data.write_mlperf(days)
    (days / "tables.json").write_text(json.dumps({"table_sizes": [1000] * 26}))
    flags = ["--dynamic"] if is_dynamic else []
    for data in (["--data", str(text)], ["--data", str(days)], []):
        for capacity, size in (([], 30), (["--capacity", "0.1"], 3)):
            arguments = ["dlrm_dcnv2", *data, "--max-table-rows", "30", *flags, *capacity]
            source = open_split(parse(arguments).config, Split.VALIDATION)
            assert source.table_sizes[0] == size
            assert max(source.table_sizes) == size
            values = torch.cat([batch.sparse.values for batch in source])
            assert (int(values.max()) >= size) == is_dynamic
            assert (int(values.min()) == MISSING_ID) == (is_dynamic and str(text) in data)


def test_mlperf_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = made_data.write_mlperf(tmp_path)
    result = result_of(
        capsys, "dlrm_dcnv2", "--data", data, "--output", tmp_path / "out", *SMALL_DLRM,
        "--batch-size", 64, "--placement", "ROW_WISE",
    )  # fmt: skip
    assert result["num_steps"] == math.ceil(200 / 64)


def test_mlperf_is_the_published_model() -> None:
    config = parse(["dlrm_dcnv2.mlperf"]).config
    assert isinstance(config, DlrmConfig)
    assert config.table_sizes == MLPERF_TABLE_SIZES
    assert sum(config.table_sizes) == 204_184_588
    assert (config.embedding_dim, config.num_cross_layers, config.low_rank) == (128, 3, 512)
    assert (config.dense_arch, config.over_arch[:2]) == ((512, 256, 128), (1024, 1024))
    assert (config.learning_rate, config.eps, config.max_table_rows) == (0.004, 1e-8, None)


@pytest.mark.parametrize(
    ("recipe", "write"),
    [("ctr-frappe", made_data.write_frappe), ("ctr-ml1m", made_data.write_ml1m)],
)
def test_ctr(recipe: str, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    output = tmp_path / "out"
    arguments = ("--data", tmp_path, "--output", output, "--learning-rate", 0.02, *SMALL_CTR)
    result = result_of(capsys, recipe, *arguments)
    by_seed = result["test_auc_by_seed"]
    assert set(by_seed) == {"1", "2"}
    # All three are rounded to six decimals, by half a unit at most.
    assert result["test_auc"] == pytest.approx(sum(by_seed.values()) / 2, rel=0, abs=2 * 0.5e-6)
    assert (output / "seed-2" / "training.png").is_file()
    assert Path(result["checkpoint"]).parent.parent == output


@pytest.mark.parametrize(
    ("recipe", "write"),
    [("ctr-frappe", made_data.write_frappe), ("ctr-ml1m", made_data.write_ml1m)],
)
def test_ctr_of_raw_ids(
    recipe: str, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In dynamic tables with a row for each id, in such that evict, and modulo as many rows."""
    write(tmp_path)
    found, modulo = [], {}
    for number, arguments in enumerate(
        (
            [],
            ["--capacity", 0.3],
            ["--dynamic"],
            ["--dynamic", "--capacity", 0.3],
        )
    ):
        common = ("--data", tmp_path, "--learning-rate", 0.02, *SMALL_CTR, "--seeds", 1)
        output = tmp_path / f"out-{number}"
        result = result_of(capsys, recipe, *common, "--output", output, *arguments)
        found.append(result["test_logloss"])
        if number == 1:
            modulo = {"modulo_" + key: result["test_" + key] for key in ("auc", "logloss")}
            modulo["modulo_auc_by_seed"] = result["test_auc_by_seed"]
        beside = {key: value for key, value in result.items() if key.startswith("modulo")}
        assert beside == (modulo if number == 3 else {})
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        ("ctr-frappe", [*SMALL_CTR, "--seeds", 1, "--learning-rate", 0.02]),
        ("ctr-ml1m", [*SMALL_CTR, "--seeds", 1, "--learning-rate", 0.02]),
        ("dlrm_dcnv2", [*SMALL_DLRM, "--batch-size", 32, "--learning-rate", 0.02]),
    ],
)
def test_bf16_is_another_computation(
    recipe: str, arguments: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = {"ctr-frappe": made_data.write_frappe, "ctr-ml1m": made_data.write_ml1m}
    data = tmp_path / "data"
    data.mkdir()
    written = write.get(recipe, made_data.write_criteo_text)(data)
    losses = set()
    for precision in ("FP32", "BF16"):
        output = tmp_path / precision
        result = result_of(
            *(capsys, recipe, "--data", written if recipe == "dlrm_dcnv2" else data),
            *("--output", output, *arguments, "--precision", precision),
        )
        assert f"Precision.{precision}" in (output / "config.txt").read_text()
        losses.add(result["test_logloss"])
    assert len(losses) == 2
