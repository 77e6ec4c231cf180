"""Results as JSON: what was measured, of which commit, by which command, on which hardware."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

Row: TypeAlias = dict[str, Any]
"""A measurement: names of figures and settings, and their values in JSON."""

TIMED_FIRST = {"profiled": "once all were timed"}
"""Part of a row whose process had not used torch's profiler when it was timed; one that has
launches kernels and graphs more slowly ever after."""


def was_timed_first(row: Row) -> bool:
    """True where ``row`` says that it was timed before anything was profiled."""
    return TIMED_FIRST.items() <= row.items()


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` to ``path``."""
    result = {
        "hardware": {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "num_gpus": torch.cuda.device_count(),
            "cpu": _cpu_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": _commit(),
        "command": " ".join([*_launcher(), "-m", *_module_and_arguments()]),
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _cpu_name() -> str:
    """The processor's model, as Linux knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _launcher() -> list[str]:
    num_ranks = os.environ.get("WORLD_SIZE")
    return ["python"] if num_ranks is None else ["torchrun", "--nproc-per-node", num_ranks]


def _module_and_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [sys.argv[0] if spec is None else spec.name, *sys.argv[1:]]
