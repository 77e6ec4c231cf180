"""Trains a recipe on ranks of this machine: ``python -m recipes.train_on_ranks <ranks> <recipe>``.

All that follows the number of ranks is as for ``python -m recipes.train``. It is checked before
there are ranks, so that its errors are printed once, and without a traceback of ``torchrun``, which
this process then becomes.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from recipes.train import parse_and_check


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the command line, then start the ranks, which share the processors of the machine."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m recipes.train_on_ranks",
        description="Train a recipe on ranks of this machine.",
        epilog="What follows RANKS is as for python -m recipes.train.",
        allow_abbrev=False,
    )
    parser.add_argument("ranks", type=_num_ranks, metavar="RANKS", help="number of processes")
    num_ranks = parser.parse_args(given[:1]).ranks
    parse_and_check(given[1:], num_ranks)
    num_threads = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "recipes.train"]
    os.execv(sys.executable, [*torchrun, *given[1:]])


def _num_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main()
