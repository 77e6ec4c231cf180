"""``python -m torchembed.serving.triton``: writes deployed models into a Triton model
repository."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchembed.serving.triton import TritonOptions, write_triton_repository


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, and print the folders; the exit status is 2 where a model cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m torchembed.serving.triton",
        description="Write deployed models into a model repository of NVIDIA's Triton.",
    )
    parser.add_argument("--models", type=Path, required=True, help="the folder of deployed models")
    parser.add_argument("--output", type=Path, required=True, help="the repository")
    parser.add_argument("--names", nargs="+", help="of models; without it, all")
    parser.add_argument("--config", type=Path, help="a server's configuration, for its stores")
    parser.add_argument("--max-batch-size", type=int, default=0, help="0: requests as they come")
    parser.add_argument("--instances", type=int, default=1, help="processes of each model")
    parser.add_argument(
        "--environment", type=Path, default=Path(sys.prefix), help="the one with torchembed"
    )
    given = parser.parse_args(arguments)
    try:
        options = TritonOptions(
            max_batch_size=given.max_batch_size,
            num_instances=given.instances,
            environment=given.environment,
        )
        written = write_triton_repository(
            given.models, given.output, names=given.names, config=given.config, options=options
        )
    except (OSError, ValueError) as error:
        print(f"torchembed.serving.triton: {error}", file=sys.stderr)
        return 2
    for folder in written:
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
