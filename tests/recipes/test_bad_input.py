"""Errors of a run are said before it trains."""

import os
import sys
from pathlib import Path

import pytest

from recipes.data_folder import find_data
from recipes.dlrm_dcnv2.run import check_memory
from recipes.registry import RECIPES
from recipes.result import Result, result_line
from recipes.serve import main as serve
from recipes.train import main, parse
from recipes.train_on_ranks import main as train_on_ranks
from tests.support import made_data
from tests.support.source_tree import ROOT


def test_data_that_is_not_there() -> None:
    with pytest.raises(
        SystemExit, match=r"recipes\.train: --data names nowhere, and there is no such file"
    ):
        main(["dlrm_dcnv2", "--data", "nowhere"])


@pytest.mark.parametrize(
    ("recipe", "needed"),
    [
        ("lr.frappe", r"Frappe_x1/train.csv or frappe_x1r/frappe_x1r.npz is needed and is not in "),
        ("mmoe", r"ml-1m/ratings.dat or ml-1m/ratings.npz is needed and is not in "),
        ("ctr-ml1m", r"ml-1m/ratings.dat or ml-1m/ratings.npz is needed and is not in "),
        ("sasrec", r"ml-1m/ratings.dat or ml-1m/ratings.npz is needed and is not in "),
        ("din", r"ml-1m/ratings.dat or ml-1m/ratings.npz is needed and is not in "),
        ("dlrm_dcnv2", r".* must hold train.txt, .*; name a folder of text, Parquet or MLPerf's "),
    ],
)
def test_a_folder_without_the_data(recipe: str, needed: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"^python -m recipes.train: {needed}.*--data"):
        main([recipe, "--data", str(tmp_path), "--output", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_data.write_frappe(tmp_path)
    train: dict[str, tuple[str, ...]] = {"Frappe_x1/train.csv": ("test.csv",)}
    assert find_data(train, tmp_path) == path
    assert find_data(train, path.parent) == path
    assert find_data({"x/x.npz": (), **train}, path.parent) == path
    monkeypatch.setenv("TORCHEMBED_DATA", str(tmp_path))
    assert find_data(train, None) == path


@pytest.mark.parametrize(("recipe", "names"), [("fm.ml1m", "users.dat"), ("hstu", "movies.dat")])
def test_a_folder_without_a_part_of_the_data(recipe: str, names: str, tmp_path: Path) -> None:
    ratings = made_data.write_ml1m(tmp_path)
    ratings.with_name(names).unlink()
    with pytest.raises(SystemExit, match=rf"ratings.dat is read with .* lacks {names}; put it"):
        main([recipe, "--data", str(tmp_path), "--output", str(tmp_path / "out")])


def test_days_that_cannot_be_trained_daily(tmp_path: Path) -> None:
    made_data.write_criteo_text(tmp_path, 20)
    with pytest.raises(SystemExit, match=r"at least two files to be trained daily, .* leave daily"):
        main(["dlrm_dcnv2", "--data", str(tmp_path), "--daily"])


def test_tasks_and_data_that_a_recipe_does_not_have(tmp_path: Path) -> None:
    made_data.write_ml1m(tmp_path)
    with pytest.raises(SystemExit, match=r"tasks must be of \['like', 'rating'\], .* \['buy'\]"):
        main(["mmoe", "--data", str(tmp_path), "--tasks", "buy"])
    with pytest.raises(SystemExit, match=r"--data must be left out for made rows, got .*; the rec"):
        main(["ple.sines", "--data", str(tmp_path)])


def test_ranks_are_started_after_the_command_line_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.extend(arguments))
    for num_ranks in ("0", "-1", "abc", ""):
        with pytest.raises(SystemExit, match="2"):
            train_on_ranks([num_ranks, "lr"])
        said = capsys.readouterr().err
        assert f"RANKS: must be a whole number of at least 1, got '{num_ranks}'" in said
    for arguments, message in (
        (("2", "nosuch"), "2"),
        (("2", "lr", "--nosuch"), "2"),
        (("2", "lr.frappe", "--data", str(tmp_path)), "is needed and is not in"),
        (("3", "lr"), "batch_size must be a multiple of the 3 ranks, got 4096; change --batch"),
        (("2", "lr", "--help"), "0"),
    ):
        with pytest.raises(SystemExit, match=message):
            train_on_ranks(arguments)
    assert not started
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    train_on_ranks(["2", "lr", "--max-epochs", "1"])
    assert started[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "recipes.train", "lr", "--max-epochs", "1"),
    ]
    assert os.environ["OMP_NUM_THREADS"] == str(max(len(os.sched_getaffinity(0)) // 2, 1))


def test_what_cannot_be_served_is_said_before_a_run_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        serve(["lr", "--nosuch"])
    assert "torchembed.serving: error: unrecognized arguments: --nosuch" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"recipes.serve: --run names nothing, and no run was"):
        serve(["lr", "--run", "nothing"])
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_trained_to_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TORCHEMBED_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="1"):
        serve(["lr.frappe"])
    said = capfd.readouterr().err
    assert "is needed and is not in" in said and "Traceback" not in said


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
        (("lr", "--embedding-std", "-1"), "embedding_std must be a number of at least 0, got -1"),
        (("lr", "--lr-decay", "inf"), "lr_decay must be a number of at least 0, got inf"),
        (("mmoe", "--min-improvement", "nan"), "min_improvement must be a number of at least 0"),
        (("dlrm_dcnv2", "--click-log.exponent", "nan"), "exponent must be a number of at least 0"),
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
