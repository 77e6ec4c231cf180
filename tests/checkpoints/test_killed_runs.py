"""Runs that are killed, and go on from their last checkpoint as if they had not been."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_run import AfterSteps, InFiles, Launcher
from torchembed.training import CheckpointFolder

NUM_RANKS, NUM_STEPS, SAVE_EVERY = 2, 75, 3
LIMIT_SECONDS = 240.0


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


def join(processes: list[Any]) -> list[int]:
    """The exit codes, of processes that must all end by themselves."""
    for process in processes:
        process.join(LIMIT_SECONDS)
    codes = [process.exitcode for process in processes]
    assert None not in codes, f"a rank hangs: {codes}"
    return codes


def losses_of(log: Path, rank: int) -> Iterator[tuple[int, str]]:
    """Step and loss of each whole line."""
    path = log.with_suffix(f".{rank}")
    text = path.read_text() if path.exists() else ""
    for line in text.split("\n")[:-1]:
        step, loss = json.loads(line)
        yield step, loss


def partial_saves(folder: Path) -> list[Path]:
    found = folder.glob("step-*") if folder.exists() else ()
    return [path for path in found if not (path / "complete.json").exists()]


def test_a_run_killed_ten_times_has_the_losses_of_one_that_was_not(
    launcher: Launcher, tmp_path: Path
) -> None:
    draw = random.Random(0)
    common = {"num_steps": NUM_STEPS, "save_every": SAVE_EVERY}
    whole = tmp_path / "whole"
    folder = tmp_path / "checkpoints"
    reference = launcher.start(
        NUM_RANKS, tmp_path / "store", {}, folder=whole, log=tmp_path / "log", wait=True, **common
    )
    assert join(reference) == [0, 0]
    expected = [dict(losses_of(tmp_path / "log", rank)) for rank in range(NUM_RANKS)]
    assert list(expected[0]) == list(range(1, NUM_STEPS + 1))

    num_within_saves, resumed_from = 0, []
    for attempt in range(11):
        log = tmp_path / f"log-{attempt}"
        victim = draw.randrange(NUM_RANKS)
        fatal: dict[int, InFiles | AfterSteps] = {}
        if attempt % 2 == 0 and attempt < 10:
            fatal[victim] = InFiles(draw.randint(1, (24, 3)[victim]), folder)
        elif attempt < 10:
            fatal[victim] = AfterSteps(draw.randint(1, 8), draw.uniform(0, 0.03))
        resumed_from.append(max(CheckpointFolder(folder).steps(), default=0))
        processes = launcher.start(
            NUM_RANKS,
            tmp_path / f"store-{attempt}",
            fatal,
            folder=folder,
            log=log,
            wait=attempt % 4 < 2,
            **common,
        )
        if attempt % 2 == 1:
            processes[victim].join(LIMIT_SECONDS)
            for process in processes:
                process.kill()
        codes = join(processes)
        assert (codes == [0, 0]) == (attempt == 10), (attempt, codes)
        assert attempt == 10 or codes[victim] == -9
        num_within_saves += bool(partial_saves(folder))
        for rank in range(NUM_RANKS):
            losses = list(losses_of(log, rank))
            assert not losses or losses[0][0] == resumed_from[-1] + 1
            assert all(expected[rank][step] == loss for step, loss in losses)
    assert dict(losses_of(log, 0))[NUM_STEPS] == expected[0][NUM_STEPS]
    # That the moments were worth trying: some within saves, and after saves of different steps.
    assert num_within_saves > 1
    assert len(set(resumed_from)) > 3
    assert partial_saves(folder) == []
    assert CheckpointFolder(folder).steps() == [NUM_STEPS - SAVE_EVERY, NUM_STEPS]


def test_a_save_that_dies_before_any_of_its_changes_of_files(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Whichever change it is, the checkpoint before it or the new one is found, and is whole."""
    first, log = tmp_path / "first", tmp_path / "log"
    steps_found = []
    num_events = 0
    while not steps_found or steps_found[-1] is not None:
        num_events += 1
        folder = tmp_path / f"dies-{num_events}"
        processes = launcher.start(
            1, first, {0: InFiles(num_events, folder)},
            folder=folder, log=log, num_steps=3, save_every=1, wait=True,
        )  # fmt: skip
        code = join(processes)[0]
        steps_found.append(max(CheckpointFolder(folder).steps(), default=0) if code else None)
    assert steps_found[0] == 0
    assert sorted(steps_found[:-1]) == steps_found[:-1]
    assert set(steps_found[:-1]) == {0, 1, 2, 3}
