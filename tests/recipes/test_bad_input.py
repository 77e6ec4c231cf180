"""Errors of a run are said before it trains."""

import os
import sys
from pathlib import Path

import pytest

from recipes.data_folder import find_data
from recipes.dlrm_dcnv2.run import check_memory
from recipes.registry import RECIPES
from recipes.result import Result, result_line
from recipes.train import main, parse
from tests.support import made_data


def test_data_that_is_not_there() -> None:
    with pytest.raises(
        SystemExit, match=r"recipes\.train: --data names nowhere, and there is no such file"
    ):
        main(["dlrm_dcnv2", "--data", "nowhere"])


@pytest.mark.parametrize("recipe", ["ctr-frappe", "ctr-ml1m"])
def test_a_folder_without_the_data(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is needed and is not in .*--data.*TORCHEMBED"):
        main([recipe, "--data", str(tmp_path), "--output", str(tmp_path / "out")])


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_data.write_frappe(tmp_path)
    assert find_data("Frappe_x1/train.csv", data=tmp_path) == path
    assert find_data("Frappe_x1/train.csv", data=path.parent) == path
    assert find_data("x/x.npz", "Frappe_x1/train.csv", data=path.parent) == path
    monkeypatch.setenv("TORCHEMBED_DATA", str(tmp_path))
    assert find_data("Frappe_x1/train.csv", data=None) == path


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"output folder .*file/out cannot be written"):
        main(["dlrm_dcnv2", "--output", str(tmp_path / "file" / "out")])


def test_an_output_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(FileExistsError, match="holds files already; name another with --output"):
        main(["dlrm_dcnv2", "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_tables_larger_than_memory(tmp_path: Path) -> None:
    data = made_data.write_mlperf(tmp_path, num_rows=10)
    arguments = ("--data", str(data), "--output", str(tmp_path / "out"))
    with pytest.raises(MemoryError, match=r"take \d+ GB, .* lower max_table_rows"):
        main(["dlrm_dcnv2.mlperf", *arguments, "--embedding-dim", "1280"])
    num_elements = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10
    check_memory(num_elements, is_copied=False)
    with pytest.raises(MemoryError, match=r"a copy of both .* take .*; leave out checkpoint_every"):
        check_memory(num_elements, is_copied=True)


def test_a_log_of_mlperf_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    arguments = ("--output", str(tmp_path / "out"), "--mlperf-log", "open")
    with pytest.raises(ImportError, match=r"mlperf_log needs .* mlperf-logging, .*; pip install"):
        main(["dlrm_dcnv2.quickstart", *arguments])


def test_fields_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("dlrm_dcnv2", "--batch-size", "0"), "batch_size must be at least 1, got 0"),
        (("dlrm_dcnv2", "--over-arch", "8", "2"), "over_arch must end with 1, the logit"),
        (("dlrm_dcnv2", "--decay-steps", "9"), "decay_start_step must be at least warmup_steps"),
        (("dlrm_dcnv2", "--patience", "0"), "patience must be at least 1 or None, got 0"),
        (("dlrm_dcnv2", "--checkpoint-every", "0"), "checkpoint_every must be at least 1 or left"),
        (
            ("ctr-ml1m", "--capacity", "0"),
            "capacity must be a number above 0, or left out, got 0.0",
        ),
        (("dlrm_dcnv2", "--shared", "1"), "shared must be at least 0 and less than 1, got 1.0"),
        (("ctr-ml1m", "--seeds", "1", "1"), "seeds must be different and at least one"),
        (("dlrm_dcnv2", "--eviction", "LRU"), "eviction must be left out without dynamic, got LRU"),
        (
            ("ctr-ml1m", "--shared", "0.1", "--capacity", "0.3"),
            "shared must be left out without dynamic and capacity",
        ),
        (
            ("ctr-ml1m", "--dynamic", "--shared", "0.1"),
            "shared must be left out without dynamic and capacity, where no id is without a row",
        ),
    ):
        with pytest.raises(SystemExit) as exit_info:
            parse(arguments)
        assert exit_info.value.code == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("no-such-recipe",), ("dlrm_dcnv2", "--no-such-field", "1")):
        with pytest.raises(SystemExit) as exit_info:
            parse(arguments)
        assert exit_info.value.code == 2
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        assert name in shown
        assert recipe.summary in shown


def test_the_result_is_json_without_nan() -> None:
    result = Result(
        test_auc=float("nan"),
        test_logloss=0.5,
        samples_per_second=1.0,
        num_steps=1,
        checkpoint=Path("runs/x"),
    )
    assert result_line(result, num_ranks=2, seconds=3.0) == (
        'RESULT {"test_auc": null, "test_logloss": 0.5, "samples_per_second": 1.0, "num_steps": 1, '
        '"checkpoint": "runs/x", "num_ranks": 2, "seconds": 3.0}'
    )
