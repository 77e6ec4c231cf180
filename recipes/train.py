"""Trains a recipe: ``python -m recipes.train <recipe>``, alone or under ``torchrun``.

``python -m recipes.train <recipe> --help`` lists all that can be changed. The last line printed is
``RESULT`` and one JSON object.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from torch.distributed.elastic.multiprocessing.errors import record

from recipes.output import prepare_output
from recipes.ranks import joined_ranks
from recipes.registry import RECIPES
from recipes.result import result_line
from torchembed.training import ranks


def parse(arguments: Sequence[str]) -> tuple[str, Any]:
    """The recipe's name, and its config with what the arguments change."""
    chooser = argparse.ArgumentParser(
        prog="python -m recipes.train",
        description="Train a recipe.",
        epilog="\n".join(f"{name:26}{recipe.summary}" for name, recipe in RECIPES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    chooser.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help="one of the below")
    name = chooser.parse_args(arguments[:1]).recipe
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--data", type=Path)
    data = finder.parse_known_args(arguments[1:])[0].data
    if data is not None and not data.exists():
        raise FileNotFoundError(f"--data names {data}, and there is no such file or folder")
    default = RECIPES[name].config(data)
    config = tyro.cli(
        type(default),
        default=default,
        args=arguments[1:],
        prog=f"python -m recipes.train {name}",
        description=RECIPES[name].summary,
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return name, config


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, train, and print the result on rank 0."""
    start = time.perf_counter()
    name, config = parse(sys.argv[1:] if arguments is None else arguments)
    with joined_ranks() as device:
        output = prepare_output(config.output, name)
        rank, num_ranks = ranks.rank(), ranks.world_size()
        if rank == 0:
            (output / "config.txt").write_text(_config_text(name, config))
        result = RECIPES[name].run(config, device, output)
    if rank == 0:
        seconds = time.perf_counter() - start
        print(result_line(result, num_ranks=num_ranks, seconds=seconds), flush=True)


def _config_text(name: str, config: Any) -> str:
    fields = (f"{f.name} = {getattr(config, f.name)!r}" for f in dataclasses.fields(config))
    return "\n".join([f"recipe = {name!r}", *fields]) + "\n"


if __name__ == "__main__":
    record(main)()
