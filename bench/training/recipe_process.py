"""One training of a recipe, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def train_recipe(arguments: Sequence[str], what: str, *, num_processes: int) -> dict[str, Any]:
    """Run ``python -m recipes.train`` with ``arguments``; the result that its last line states.

    Args:
        arguments: the recipe's name and its flags.
        what: the training, in errors.
        num_processes: how many run at a time and share the machine's processors.

    Raises:
        RuntimeError: where it failed; says what it printed last.
    """
    num_threads = max(1, (os.cpu_count() or 1) // num_processes)
    ended = subprocess.run(
        [sys.executable, "-m", "recipes.train", *arguments],
        env={"OMP_NUM_THREADS": str(num_threads), **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    word, _, text = (ended.stdout.splitlines() or [""])[-1].partition(" ")
    if ended.returncode or word != "RESULT":
        said = (ended.stderr or ended.stdout).strip()[-2000:]
        raise RuntimeError(f"{what}, ended with {ended.returncode}: {said}")
    return json.loads(text)
