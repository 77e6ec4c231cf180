"""One launch of two ranks for the tests that ask little of them, since a launch costs seconds.

A module of tests says by ``everything(device_type)``, or ``everything_on_the_cpu()``, what it
compares, which a rank computes; its tests find it in ``answers`` under the module's name.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks

Call = tuple[Callable[..., Any], tuple[str, ...]]
"""A function and its arguments."""


def programs(items: Sequence[pytest.Item], device_type: str) -> dict[str, Call]:
    """The comparisons of the modules that ``items`` of this folder come from, by the modules' names
    without ``test_``."""
    here = Path(__file__).parent
    found: dict[str, Call] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent != here:
            continue
        module, name = item.module, item.path.stem.removeprefix("test_")
        if hasattr(module, "everything"):
            found[name] = module.everything, (device_type,)
        elif hasattr(module, "everything_on_the_cpu") and device_type == "cpu":
            found[name] = module.everything_on_the_cpu, ()
    return found


def ask(calls: dict[str, Call]) -> dict[str, Any]:
    """On a rank: what each call returns."""
    return {name: function(*arguments) for name, (function, arguments) in calls.items()}


@pytest.fixture(scope="session")
def answers(request: pytest.FixtureRequest, device: torch.device) -> list[dict[str, Any]]:
    """Those of each of two ranks."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, and {torch.cuda.device_count()} is here")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    return run_on_ranks(2, ask, programs(request.session.items, device.type), backend=backend)


@pytest.fixture(scope="session")
def cpu_answers(device: torch.device, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, of what is asked on the CPU alone."""
    if device.type == "cuda":
        pytest.skip("asks what FBGEMM does on the CPU")
    return answers
