"""The versions that belong together: one table for the set-up, the doctor and the pages.

Needs the standard library alone, so it also runs as a script before anything is installed:
``python torchembed/core/versions.py --requirements cpu``.
"""

import sys

if __name__ == "__main__":
    # A script's own folder comes first, and core/types.py would hide the standard library's types.
    sys.path.pop(0)

import argparse
import importlib.util
from typing import NamedTuple


class Pairing(NamedTuple):
    """Releases that were built for each other."""

    torch: str
    triton: str
    fbgemm: str
    torchrec: str


PAIRINGS = (
    Pairing(torch="2.11.0", triton="3.6.0", fbgemm="1.6.0", torchrec="1.6.1"),
    Pairing(torch="2.13.0", triton="3.7.1", fbgemm="1.8.0", torchrec="1.8.0"),
    Pairing(torch="2.14.0", triton="3.8.0", fbgemm="1.9.0", torchrec="1.9.0"),
)

SETUP = PAIRINGS[1]
"""The releases that ``make`` installs."""

NUMPY = "2.3.5"
"""The release that ``make`` installs."""

NUMPY_LIMIT = "2.4"
"""From this release on, Triton's interpreter (not its compiler) fails at ``range`` of a tensor."""

FBGEMM_DISTRIBUTION = {"cpu": "fbgemm-gpu-cpu", "gpu": "fbgemm-gpu"}

TORCHREC_NEEDS = ("tensordict", "pyre-extensions", "iopath")
"""Modules that torchrec imports besides torch and fbgemm. It goes in without its dependencies: it
asks for the distribution fbgemm-gpu by name, also where there is no GPU, and pins an old
torchmetrics."""

NEEDED_MODULES = {
    "native": ("torch", "setuptools"),
    "train": ("torch", "numpy", "matplotlib", "sklearn", "tqdm", "tyro"),
    "serve": (
        *("torch", "numpy", "matplotlib", "sklearn", "tqdm", "tyro", "confluent_kafka"),
        *("grpc", "prometheus_client", "redis", "rocksdict", "starlette", "uvicorn", "yaml"),
    ),
    "test": (
        *("torch", "numpy", "triton", "torchrec", "fbgemm_gpu"),
        *("matplotlib", "polars", "pyarrow", "torchmetrics", "tqdm", "tyro"),
        *("build", "hypothesis", "pytest", "pytest_timeout", "rocksdict", "sklearn", "xdist"),
        *("confluent_kafka", "grpc", "hiredis", "prometheus_client", "redis", "starlette"),
        *("tritonclient", "uvicorn", "yaml"),
    ),
}
"""Modules that each make target imports where it runs an interpreter that it did not set up."""


def release(version: str) -> str:
    """The first two numbers of a version: ``"2.13.0+cpu"`` gives ``"2.13"``."""
    return ".".join(version.split(".")[:2])


def release_number(version: str) -> tuple[int, ...]:
    """``release`` as numbers, which compare: ``"2.13.0+cpu"`` gives ``(2, 13)``."""
    return tuple(int(part) for part in release(version).split("."))


def pairing_of(torch_version: str) -> Pairing | None:
    """The row of the table for a torch version, or None where the table has none."""
    matches = (row for row in PAIRINGS if release(row.torch) == release(torch_version))
    return next(matches, None)


def requirements(device: str) -> list[str]:
    """Pinned requirements of the set-up for ``"cpu"`` or ``"gpu"``, torchrec excepted."""
    return [
        f"torch=={SETUP.torch}",
        f"triton=={SETUP.triton}",
        f"numpy=={NUMPY}",
        f"{FBGEMM_DISTRIBUTION[device]}=={SETUP.fbgemm}",
        *TORCHREC_NEEDS,
    ]


def requirements_without_dependencies() -> list[str]:
    """Pinned requirements that are to be installed with pip's ``--no-deps``."""
    return [f"torchrec=={SETUP.torchrec}"]


def missing_modules(target: str) -> list[str]:
    """Modules that a make target needs and this interpreter does not find."""
    return [name for name in NEEDED_MODULES[target] if importlib.util.find_spec(name) is None]


def pairings_table() -> str:
    """The table in Markdown, as ``docs/torchrec.md`` shows it."""
    lines = [
        "| torch | triton | fbgemm-gpu | torchrec |",
        "| --- | --- | --- | --- |",
        *(
            f"| {release(row.torch)} | {row.triton} | {release(row.fbgemm)} "
            f"| {release(row.torchrec)} |"
            for row in PAIRINGS
        ),
    ]
    return "\n".join(lines)


def _print_missing(target: str) -> int:
    missing = missing_modules(target)
    if missing:
        print(f"{sys.executable} lacks these modules: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def _print_lines(lines: list[str]) -> int:
    print("\n".join(lines))
    return 0


def main(arguments: list[str]) -> int:
    """Print what was asked for; the exit status is 1 where something needed is missing."""
    parser = argparse.ArgumentParser(description="Versions that belong together.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--requirements", choices=FBGEMM_DISTRIBUTION, help="pinned requirements")
    group.add_argument("--requirements-without-dependencies", action="store_true")
    group.add_argument("--missing", choices=NEEDED_MODULES, help="modules that are not installed")
    group.add_argument("--table", action="store_true", help="the table in Markdown")
    asked = parser.parse_args(arguments)
    if asked.missing:
        return _print_missing(asked.missing)
    if asked.table:
        return _print_lines([pairings_table()])
    if asked.requirements:
        return _print_lines(requirements(asked.requirements))
    return _print_lines(requirements_without_dependencies())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
