"""Runs that signals ended go on as if nothing had happened."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.loop import TrainLoop
from recipes.dlrm_dcnv2.run import build_model, build_optimizers, open_split
from recipes.train import main, parse
from tests.support import made_data
from tests.support.ranks import run_on_ranks
from tests.support.small_recipes import SMALL_CTR
from torchembed.data import BackgroundLoader, Batch, BatchSource, ClickLog, Portion, Split
from torchembed.data.source import BatchTask
from torchembed.training import CheckpointFolder, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--embedding-dim", "4", "--dense-arch", "8", "4", "--over-arch", "8", "1"),
    *("--num-cross-layers", "2", "--low-rank", "2", "--click-log.num-held-out", "300"),
    *("--batch-size", "128", "--evaluate-every", "4", "--read-loss-every", "3"),
    *("--warmup-steps", "5", "--decay-start-step", "9", "--decay-steps", "40"),
    *("--click-log.num-train", "2200", "--epochs", "1000"),
)
NUM_MORE = 21


class SignalsAtALine(io.StringIO):
    """Sends SIGTERM to a process once what is written ``shows`` something."""

    def __init__(self, shows: str, process: int) -> None:
        super().__init__()
        self.shows, self.process, self.is_sent = shows, process, False

    def write(self, text: str) -> int:
        if self.shows in text and not self.is_sent:
            os.kill(self.process, signal.SIGTERM)
            self.is_sent = True
        return super().write(text)


def train_until_the_last_rank_is_signalled(shown: str, *arguments: str) -> tuple[object, str]:
    """On a rank: the exit status and what is printed of a run, whose last rank gets SIGTERM once a
    line says ``shown``."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    with (
        contextlib.redirect_stderr(SignalsAtALine(shown, pids[-1])),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as stopped,
    ):
        main(["dlrm_dcnv2", *arguments])
    return stopped.value.code, printed.getvalue()


def signal_torchrun(shown: str, *arguments: str) -> str:
    """Start two ranks by ``torchrun``, send SIGTERM to it once a line says ``shown``; all that they
    say."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.Popen(
        [sys.executable, *start, "-m", "recipes.train", "dlrm_dcnv2", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if shown in line:
                process.terminate()
                break
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, "".join(said) + err
    return "".join(said) + err + out


def stopped_at(said: str, folder: Path) -> int:
    found = re.search(r"^stopped at step (\d+); go on with --resume (.*)$", said, re.MULTILINE)
    assert found, said
    assert found[2] == str(folder)
    return int(found[1])


def go_on_and_start_over(folder: Path, num_steps: int) -> str:
    """The stopped run to ``num_steps``, the same run in one go, and its end once more; before
    that, what ranks are told that were started with different arguments."""
    differing = ("--output", str(folder / "differing"), "--seed", str(dist.get_rank()))
    with pytest.raises(ValueError, match="ranks must agree") as refused:
        main(["dlrm_dcnv2", *SMALL, *differing])
    to_the_end = ("--max-steps", str(num_steps))
    main(["dlrm_dcnv2", "--resume", str(folder / "parts"), *to_the_end])
    saving = ("--checkpoint-every", "8", "--output", str(folder / "whole"))
    main(["dlrm_dcnv2", *SMALL, *saving, *to_the_end])
    if dist.get_rank() == 0:
        lose_the_end(folder)
    dist.barrier()
    main(["dlrm_dcnv2", "--resume", str(folder / "again")])
    return str(refused.value)


def lose_the_end(folder: Path) -> None:
    """Copy ``whole`` to ``again``, all but its newest checkpoint."""
    shutil.copytree(folder / "whole", folder / "again")
    checkpoints = folder / "again" / "checkpoint"
    newest = CheckpointFolder(checkpoints).steps()[-1]
    shutil.rmtree(next(checkpoints.glob(f"step-*{newest}")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``parts`` was stopped twice before its end, ``whole`` never, ``again`` lost its end."""
    folder = tmp_path_factory.mktemp("runs")
    parts = folder / "parts"
    in_parts = (*SMALL, "--output", str(parts))
    of_ranks = run_on_ranks(2, train_until_the_last_rank_is_signalled, "step 8:", *in_parts)
    assert [status for status, _ in of_ranks] == [75, 75]
    first = stopped_at(of_ranks[0][1], parts)
    assert first >= 9
    assert CheckpointFolder(parts / "checkpoint").steps() == [first]
    more = f"step {4 * (first // 4 + 3)}:"
    second = stopped_at(signal_torchrun(more, "--resume", str(parts)), parts)
    assert second > first + 8
    num_steps = second + NUM_MORE
    for refused in run_on_ranks(2, go_on_and_start_over, folder, num_steps):
        assert refused.startswith(
            "ranks must agree on config: rank 0 has seed = 0, rank 1 has seed = 1; start every rank"
        )
    assert not (folder / "differing").exists()
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run, but for what is measured by the clock."""
    return [
        {key: value for key, value in line.items() if key not in ("time", "samples_per_second")}
        for line in read_metrics(folder)
    ]


def test_losses_and_evaluations_are_the_same_bit_for_bit(folder: Path) -> None:
    parts, whole = (metrics(folder / name) for name in ("parts", "whole"))
    assert parts == whole
    assert whole[-2]["step"] == whole[-1]["step"]
    assert "loss" in whole[-2]
    assert "validation_auc" in whole[-1]
    epochs = 1 + whole[-1]["step"] // -(-2200 // 128)
    assert epochs > 2


def test_a_run_that_lost_its_end_gets_it_again(folder: Path) -> None:
    assert metrics(folder / "again") == metrics(folder / "whole")
    steps = [CheckpointFolder(folder / name / "checkpoint").steps() for name in ("again", "whole")]
    assert steps[0] == steps[1]


def test_one_process_goes_on_from_two(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_steps = metrics(folder / "whole")[-1]["step"]
    main(["dlrm_dcnv2", "--resume", str(folder / "parts"), "--max-steps", str(num_steps + 4)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    assert result["num_steps"] == num_steps + 4
    assert result["num_ranks"] == 1
    # Fewer steps than are done already: there is nothing to do.
    main(["dlrm_dcnv2", "--resume", str(folder / "parts"), "--max-steps", str(num_steps)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    assert result["num_steps"] == num_steps + 4
    paths = [folder / "parts" / name for name in ("arguments.json", "config.txt")]
    notes = [path.read_text() for path in paths]
    with pytest.raises(ValueError, match=r"learning_rate must stay .*, 0\.02, got 0\.5; begin"):
        main(["dlrm_dcnv2", "--resume", str(folder / "parts"), "--learning-rate", "0.5"])
    with pytest.raises(ValueError, match=r"mlperf_log must be left out where a run goes on"):
        main(["dlrm_dcnv2", "--resume", str(folder / "parts"), "--mlperf-log", "open"])
    # What could not go on has changed nothing: the run does, with its own arguments.
    assert notes == [path.read_text() for path in paths]
    main(["dlrm_dcnv2", "--resume", str(folder / "parts")])


def new_loop(config: DlrmConfig, rows: BatchSource, validation: Any, output: Path) -> TrainLoop:
    """A training in this process, from the newest checkpoint in ``output`` on."""
    output.mkdir(exist_ok=True)
    model = build_model(config, rows, torch.device("cpu"))
    return TrainLoop(
        config=config,
        model=model,
        optimizers=build_optimizers(config, model),
        loader=BackgroundLoader(rows),
        validation=validation,
        steps_per_epoch=len(rows),
        output=output,
    )


class SignalsAtABatch(ClickLog):
    """Sends this process SIGTERM as the fifth batch is read."""

    def tasks(self, after: Sequence[Portion] = ()) -> Iterator[BatchTask]:
        for number, task in enumerate(super().tasks(after)):
            if number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            yield task


@pytest.mark.parametrize("flag", ["--max-steps", "--evaluate-every"])
def test_a_run_that_was_stopped_is_evaluated_where_it_is(flag: str, tmp_path: Path) -> None:
    few_points = (*SMALL, "--evaluate-every", "1000", "--read-loss-every", "1000")
    config = parse(["dlrm_dcnv2", *few_points]).config
    rows, validation = (open_split(config, split) for split in (Split.TRAIN, Split.VALIDATION))
    signalling = SignalsAtABatch(config.click_log, batch_size=config.batch_size)
    stopped = new_loop(config, signalling, validation, tmp_path / "stopped")
    assert not stopped.run()
    num_steps = stopped.history.num_steps
    assert not stopped.history.losses
    limits = {"--max-steps": num_steps + 1, flag: num_steps}
    changed = [str(part) for limit in limits.items() for part in limit]
    config = parse(["dlrm_dcnv2", *few_points, *changed]).config
    for name in ("stopped", "whole"):
        assert new_loop(config, rows, validation, tmp_path / name).run()
    points, expected = (metrics(tmp_path / name) for name in ("stopped", "whole"))
    assert expected[0].pop("lr")
    assert points == expected
    assert [line["step"] for line in points][:2] == [num_steps, num_steps]


def test_a_signal_during_an_evaluation_ends_it(tmp_path: Path) -> None:
    config = parse(["dlrm_dcnv2", *SMALL, "--max-steps", "8"]).config
    is_killing = True
    rows, validation = (open_split(config, split) for split in (Split.TRAIN, Split.VALIDATION))

    class Validation:
        def __iter__(self) -> Iterator[Batch]:
            for batch in validation:
                if is_killing:
                    signal.raise_signal(signal.SIGTERM)
                yield batch

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    assert not new_loop(config, rows, Validation(), stopped).run()
    assert CheckpointFolder(stopped / "checkpoint").steps() == [4]
    assert "validation_auc" not in metrics(stopped)[-1]
    is_killing = False
    assert new_loop(config, rows, Validation(), stopped).run()
    assert new_loop(config, rows, validation, whole).run()
    assert metrics(stopped) == metrics(whole)


def test_what_to_resume_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no run of dlrm_dcnv2 to go on with; name"):
        parse(["dlrm_dcnv2", "--resume"])
    with pytest.raises(FileNotFoundError, match="--resume names nothing, and no run was started"):
        parse(["dlrm_dcnv2", "--resume", "nothing"])
    (tmp_path / "runs").mkdir()
    for time in ("20260101-000000", "20260102-000000"):
        (tmp_path / "runs" / f"dlrm_dcnv2-{time}").symlink_to(folder / "parts")
    command = parse(["dlrm_dcnv2", "--resume", "--seed", "7"])
    assert command.is_resumed
    assert command.config.output == Path("runs/dlrm_dcnv2-20260102-000000")
    assert (command.config.seed, command.config.warmup_steps) == (7, 5)
    monkeypatch.chdir(folder / "parts")
    assert parse(["dlrm_dcnv2", "--resume", "."]).config.output == Path()
    with pytest.raises(ValueError, match=r"a run of dlrm_dcnv2, and .* ctr-ml1m; give dlrm"):
        parse(["ctr-ml1m", "--resume", str(folder / "parts")])


def test_a_ctr_run_goes_on_after_its_last_whole_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_data.write_frappe(tmp_path)
    arguments = ("--data", tmp_path, *SMALL_CTR, "--max-epochs", 4, "--patience", 4)

    def run(name: str, *more: object) -> dict[str, Any]:
        main(["ctr-frappe", *map(str, [*arguments, "--output", tmp_path / name, *more])])
        return json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))

    whole = run("whole")
    run("parts", "--max-epochs", 2, "--seeds", 1)
    main(["ctr-frappe", "--resume", str(tmp_path / "parts"), "--max-epochs", "4"])
    capsys.readouterr()
    assert metrics(tmp_path / "parts" / "seed-1") == metrics(tmp_path / "whole" / "seed-1")
    # A seed that is done is not trained again; the others are.
    main(["ctr-frappe", "--resume", str(tmp_path / "parts"), "--seeds", "1", "2"])
    parts = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    for field in ("test_auc_by_seed", "test_logloss_by_seed", "num_steps"):
        assert parts[field] == whole[field]


def test_the_best_model_is_kept_and_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([
        "dlrm_dcnv2", *SMALL, "--output", str(tmp_path / "out"), "--learning-rate", "10.0",
        "--keep-best", "--patience", "3", "--warmup-steps", "0", "--decay-steps", "0",
    ])  # fmt: skip
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    aucs = {
        line["step"]: line["validation_auc"]
        for line in metrics(tmp_path / "out")
        if "validation_auc" in line
    }
    best = max(aucs, key=lambda step: aucs[step])
    assert list(aucs)[-1] == result["num_steps"] == best + 12
    assert result["checkpoint"] == str(tmp_path / "out" / "best")
    assert CheckpointFolder(tmp_path / "out" / "best").steps() == [best]
    assert CheckpointFolder(tmp_path / "out" / "checkpoint").steps() == [best + 12]
    # A later best of a run that died before it saved itself is not this run's.
    files = tmp_path / "out" / "best"
    shutil.copytree(files / f"step-{best:09d}", files / f"step-{best + 1:09d}")
    (files / f"step-{best + 1:09d}" / "__0_0.distcp").write_bytes(b"")
    main(["dlrm_dcnv2", "--resume", str(tmp_path / "out")])
    again = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    assert again["test_auc"] == result["test_auc"]


def test_a_best_model_that_was_not_kept_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "alike"
    alike = ("--click-log.click-rate", "1e-9", "--max-steps", "4", "--keep-best")
    main(["dlrm_dcnv2", *SMALL, *alike, "--output", str(output)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    # No evaluation has an AUC, so none is the best.
    assert result["test_auc"] is None
    assert result["checkpoint"] == str(output / "checkpoint")
    output = tmp_path / "late"
    main(["dlrm_dcnv2", *SMALL, "--max-steps", "4", "--output", str(output)])
    with pytest.raises(ValueError, match=r"keep_best must be given where .*, after step 4; leave"):
        main(["dlrm_dcnv2", "--resume", str(output), "--keep-best", "--max-steps", "8"])
