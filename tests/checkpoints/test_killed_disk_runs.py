"""Runs with tables on disk that are killed, and go on from their last checkpoint."""

import json
import os
import random
from pathlib import Path

from tests.support.killed_run import AfterSteps, InFiles, Launcher
from torchembed.training import CheckpointFolder

NUM_KILLS = int(os.environ.get("TORCHEMBED_DISK_KILLS", "4"))
NUM_RANKS, NUM_STEPS, SAVE_EVERY = 1, 12 * NUM_KILLS, 2
LIMIT_SECONDS = 240.0


def losses_of(log: Path, rank: int) -> dict[int, str]:
    path = log.with_suffix(f".{rank}")
    text = path.read_text() if path.exists() else ""
    return dict(json.loads(line) for line in text.split("\n")[:-1])


def test_a_killed_run_has_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    """With rows in the caches, in host memory and on disk, trained by a pipeline, and killed at any
    moment: within steps, saves and loads. What was on disk is of no use then, and the checkpoint
    has it all."""
    launcher, draw = Launcher(), random.Random(0)
    (tmp_path / "whole-disk").mkdir()
    (tmp_path / "disk").mkdir()

    def start(
        name: str, folder: str, disk: str, fatal: dict[int, InFiles | AfterSteps], wait: bool
    ):
        return launcher.start(
            NUM_RANKS,
            tmp_path / f"store-{name}",
            fatal,
            folder=tmp_path / folder,
            log=tmp_path / f"log-{name}",
            disk=tmp_path / disk,
            num_steps=NUM_STEPS,
            save_every=SAVE_EVERY,
            wait=wait,
        )

    def codes_of(processes) -> list[int]:
        for process in processes:
            process.join(LIMIT_SECONDS)
        return [process.exitcode for process in processes]

    assert codes_of(start("whole", "whole", "whole-disk", {}, True)) == [0] * NUM_RANKS
    expected = [losses_of(tmp_path / "log-whole", rank) for rank in range(NUM_RANKS)]
    assert list(expected[0]) == list(range(1, NUM_STEPS + 1))
    resumed_from = []
    for attempt in range(NUM_KILLS + 1):
        is_last, victim, fatal = attempt == NUM_KILLS, draw.randrange(NUM_RANKS), {}
        if attempt % 2 == 0 and not is_last:
            # Within a save: before one of its changes of files.
            fatal[victim] = InFiles(draw.randint(1, 40), tmp_path / "checkpoints")
        elif not is_last:
            fatal[victim] = AfterSteps(draw.randint(1, 8), draw.uniform(0, 0.05))
        resumed_from.append(max(CheckpointFolder(tmp_path / "checkpoints").steps(), default=0))
        processes = start(str(attempt), "checkpoints", "disk", fatal, attempt % 4 < 2)
        if attempt % 2 == 1 and not is_last:
            processes[victim].join(LIMIT_SECONDS)
            for process in processes:
                process.kill()
        codes = codes_of(processes)
        assert (codes == [0] * NUM_RANKS) == is_last, (attempt, codes)
        assert is_last or codes[victim] == -9
        for rank in range(NUM_RANKS):
            losses = losses_of(tmp_path / f"log-{attempt}", rank)
            assert not losses or min(losses) == resumed_from[-1] + 1
            assert all(expected[rank][step] == loss for step, loss in losses.items())
    assert losses_of(tmp_path / f"log-{NUM_KILLS}", 0)[NUM_STEPS] == expected[0][NUM_STEPS]
    assert len(set(resumed_from)) > 2
