"""One launch of two ranks, and one of four, for the tests that ask little of them, since a launch
costs seconds.

A module of tests says by ``everything(device_type)``, or ``everything_on_the_cpu()``, what it
compares, which a rank computes; its tests find it in ``answers`` under the module's name. That of
four ranks it says by ``everything_on_four(device_type)``, for ``answers_of_four``.
"""

import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_on_ranks

Call = tuple[Callable[..., Any], tuple[str, ...]]
"""A function and its arguments."""


def modules_of(items: Sequence[pytest.Item]) -> Iterator[tuple[str, Any]]:
    """The modules of this folder that ``items`` come from, with their names without ``test_``."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
            yield item.path.stem.removeprefix("test_"), item.module


def programs(items: Sequence[pytest.Item], device_type: str) -> dict[str, Call]:
    """The comparisons of the modules that ``items`` of this folder come from, by the modules' names
    without ``test_``."""
    found: dict[str, Call] = {}
    for name, module in modules_of(items):
        if hasattr(module, "everything"):
            found[name] = module.everything, (device_type,)
        elif hasattr(module, "everything_on_the_cpu") and device_type == "cpu":
            found[name] = module.everything_on_the_cpu, ()
    return found


def ask(calls: dict[str, Call]) -> dict[str, Any]:
    """On a rank: the results of the calls."""
    importlib.import_module("torchrec")
    gc.freeze()  # collections, which some of the calls ask for, do not look at TorchRec's modules
    return {name: function(*arguments) for name, (function, arguments) in calls.items()}


def asked(num_ranks: int, calls: dict[str, Call], device: torch.device) -> list[dict[str, Any]]:
    """The results of the calls on each of ``num_ranks``."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, and {torch.cuda.device_count()} is here")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    return run_on_ranks(num_ranks, ask, calls, backend=backend)


@pytest.fixture(scope="session")
def answers(request: pytest.FixtureRequest, device: torch.device) -> list[dict[str, Any]]:
    """Those of each of two ranks."""
    return asked(2, programs(request.session.items, device.type), device)


@pytest.fixture(scope="session")
def answers_of_four(request: pytest.FixtureRequest, device: torch.device) -> list[dict[str, Any]]:
    """Those of each of four ranks."""
    calls: dict[str, Call] = {
        name: (module.everything_on_four, (device.type,))
        for name, module in modules_of(request.session.items)
        if hasattr(module, "everything_on_four")
    }
    return asked(4, calls, device)


@pytest.fixture(scope="session")
def cpu_answers(device: torch.device, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, of what is asked on the CPU alone."""
    if device.type == "cuda":
        pytest.skip("asks what FBGEMM does on the CPU")
    return answers
