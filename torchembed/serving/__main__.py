"""``python -m torchembed.serving``: serves the models of a folder."""

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from torchembed.serving.interface import ModelState, UnknownModelError
from torchembed.serving.server import Server, add_flags, config_of, memory_table
from torchembed.stores import RowStoreError


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchembed.serving",
        description="Serve the models of a folder by the Open Inference Protocol.",
    )
    parser.add_argument("--models", type=Path, help="the folder that deploy() wrote into")
    parser.add_argument(
        "--check", action="store_true", help="print the memory that is needed, and load nothing"
    )
    add_flags(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a graceful end, 2 where the server could not start.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    given = make_parser().parse_args(arguments)
    try:
        config = config_of(given, given.models)
        if given.check:
            print(memory_table(config))
            return 0
        server = Server(config)
        with server:
            server.start()
            for name, protocol in (("http", server.http), ("grpc", server.grpc)):
                if protocol is not None:
                    print(f"{name}: {protocol.address}", flush=True)
            loaded = [e for e in server.repository.index() if e.state is ModelState.READY]
            for entry in loaded:
                print(f"model: {entry.name}, version {entry.version}", flush=True)
            if not loaded:
                print(f"model: none yet in {config.models_folder}", flush=True)
            print("ready", flush=True)
            server.serve()
    except (ImportError, OSError, RowStoreError, UnknownModelError, ValueError) as error:
        print(f"torchembed.serving: {error}", file=sys.stderr)
        return 2
    return 0


def _freeze_imports() -> None:
    """Leave all that imported modules hold out of garbage collections: some 350,000 objects, over
    which a collection would stop every thread, and so every answer, for a fifth of a second.

    Not for a process that does more than serve: its own cycles of objects would never be freed.
    """
    import torch.export.pt2_archive  # noqa: F401 - as loading a model does

    gc.collect()
    gc.freeze()


_SWITCH_SECONDS = 1e-4
"""For how long a thread that computes in Python keeps the interpreter from others. An answer takes
the interpreter again after each of its tensor operations: with Python's own 5 ms, p99 is 200 ms
while another thread reads the program of a new version, and 40 ms with these."""


if __name__ == "__main__":
    _freeze_imports()
    sys.setswitchinterval(_SWITCH_SECONDS)
    sys.exit(main())
