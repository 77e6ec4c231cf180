"""Trains a recipe: ``python -m recipes.train <recipe>``, alone or under ``torchrun``.

``python -m recipes.train <recipe> --help`` lists all that can be changed. The last line printed is
``RESULT`` and one JSON object. ``--resume [FOLDER]`` goes on with the run of that folder, or of the
one started last, with its arguments and those that are given now. A run that SIGTERM or SIGINT
ended, after saving, exits with the code 75. Processes that ``torchrun`` starts again go on with the
run of those before them.
"""

import argparse
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from torch.distributed.elastic.multiprocessing.errors import record

import recipes
import torchembed
from recipes.launch import num_launched_ranks
from recipes.output import (
    CONFIG_FILE,
    earlier_arguments,
    earlier_notes_kept,
    newest_run,
    prepare_output,
)
from recipes.ranks import joined_ranks
from recipes.registry import RECIPES
from recipes.result import Stopped, result_line
from torchembed.core import ranks
from torchembed.data.data_path import data_path
from torchembed.training import check_ranks_agree, source_files

STOPPED_EXIT_CODE = 75
"""BSD's EX_TEMPFAIL: try again, here with ``--resume``."""


class Command(NamedTuple):
    """A parsed command line."""

    recipe: str
    config: Any
    arguments: list[str]
    """All that made the config, also those of the run that is gone on with."""
    is_resumed: bool


def parse(arguments: Sequence[str]) -> Command:
    """The recipe's name, and its config with what the arguments change.

    Raises:
        FileNotFoundError: where ``--data`` or ``--resume`` names what is not there.
        ValueError: where ``--resume`` names a run of another recipe.
    """
    chooser = argparse.ArgumentParser(
        prog="python -m recipes.train",
        description="Train a recipe, or go on with a run of it: RECIPE --resume [FOLDER].",
        epilog="\n".join(f"{name:26}{recipe.summary}" for name, recipe in RECIPES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    chooser.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help="one of the below")
    name = chooser.parse_args(arguments[:1]).recipe
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", type=Path, nargs="?", const=True, default=None)
    found, options = finder.parse_known_args(arguments[1:])
    if found.resume is not None:
        folder = newest_run(name) if found.resume is True else found.resume
        options = [*earlier_arguments(folder, name), *options, "--output", str(folder)]
    finder.add_argument("--data")
    data = finder.parse_known_args(options)[0].data
    if data is not None and not data_path(data).exists():
        raise FileNotFoundError(f"--data names {data}, and there is no such file or folder")
    default = RECIPES[name].config(data)
    config = tyro.cli(
        type(default),
        default=default,
        args=options,
        prog=f"python -m recipes.train {name}",
        description=f"{RECIPES[name].description}\n\n--resume [FOLDER] goes on with a run.",
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return Command(name, config, options, found.resume is not None)


def parse_and_check(arguments: Sequence[str], num_ranks: int) -> Command:
    """As :func:`parse`, and checked by the recipe's ``check`` for ``num_ranks``.

    Raises:
        SystemExit: in place of the errors of both, with their messages.
    """
    try:
        command = parse(arguments)
        check = RECIPES[command.recipe].check
        if check is not None:
            check(command.config, num_ranks)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"python -m recipes.train: {error}") from error
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, train, and print the result on rank 0."""
    start = time.perf_counter()
    given = sys.argv[1:] if arguments is None else arguments
    name, config, options, is_resumed = parse_and_check(given, num_launched_ranks())
    # What sharding takes of the memory.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchembed").setLevel(logging.INFO)
    with joined_ranks() as device, earlier_notes_kept(config.output if is_resumed else None):
        text = _config_text(name, config)
        check_ranks_agree(config=text, code=source_files(torchembed, recipes))
        output = prepare_output(config.output, name, options, is_resumed=is_resumed)
        rank, num_ranks = ranks.rank(), ranks.world_size()
        if rank == 0:
            (output / CONFIG_FILE).write_text(text)
        result = RECIPES[name].run(config, device, output)
        if isinstance(result, Stopped):
            if rank == 0:
                done = f"stopped at step {result.num_steps}"
                print(f"{done}; go on with --resume {output}", flush=True)
            # Once one rank has exited with a code, torchrun ends the others.
            ranks.any_rank(False)
    if isinstance(result, Stopped):
        raise SystemExit(STOPPED_EXIT_CODE)
    if rank == 0:
        seconds = time.perf_counter() - start
        print(result_line(result, num_ranks=num_ranks, seconds=seconds), flush=True)


def _config_text(name: str, config: Any) -> str:
    fields = (f"{f.name} = {getattr(config, f.name)!r}" for f in dataclasses.fields(config))
    return "\n".join([f"recipe = {name!r}", *fields]) + "\n"


if __name__ == "__main__":
    record(main)()
