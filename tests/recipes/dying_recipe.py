"""A script for ``torchrun`` that trains a recipe, whose rank 1 is killed twice.

The first argument is the folder in which it counts that. In the checkpoint of the step in the
second one the rank is killed alone, in that of the third one with the ``torchrun`` that started it,
as a node dies. The others are those of ``recipes.train``.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from recipes.train import main


def die(counted: Path, first_step: int, second_step: int) -> None:
    """Let this process be killed when it first writes to the checkpoint in which it is to die."""
    deaths = len(list(counted.glob("death-*")))
    if deaths == 2:
        return
    name = f"step-{(first_step, second_step)[deaths]:09d}"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or name not in str(arguments[0]):
            return
        (counted / f"death-{deaths}").mkdir()
        if deaths == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


if __name__ == "__main__":
    counted, first_step, second_step, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1":
        die(Path(counted), int(first_step), int(second_step))
    record(main)(arguments)
