"""Eager steps do what a loop by hand does, and little more."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.harness import made, plain_step
from tests.zoo.sizes import tiny
from tests.zoo.zoo import ENTRIES
from torchembed.training import TrainPipeline

SIZES = tiny(torch.device("cpu"))
WITHOUT_WORK = ("aten.detach", "aten.view", "aten.squeeze", "aten.unsqueeze", "profiler.")
"""Views, and records for profiles."""


class Counted(TorchDispatchMode):
    """Counts the operations within it, but those that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = collections.Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not str(func).startswith(WITHOUT_WORK):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], object]) -> collections.Counter[str]:
    """The operations of a step, once the first ones have made states and shown what to join."""
    for _ in range(4):
        step()
    with Counted() as mode:
        step()
    return mode.calls


def both(name: str) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """The operations of an eager step and of a plain one."""
    entry = ENTRIES[name]
    batches = entry.batches(SIZES, 6)
    plain, ours = made(entry, SIZES), made(entry, SIZES)
    of_plain, of_pipeline = iter(batches), iter(batches)
    expected = counted(lambda: plain_step(plain, next(of_plain)))
    with TrainPipeline(ours.model, ours.loss_fn, ours.optimizers, capture=False) as pipeline:
        found = counted(lambda: pipeline.progress(of_pipeline))
    return found, expected


@pytest.mark.parametrize(
    "name",
    [
        "DeepFM",
        "weighted bags",
        "torch's Adam with amsgrad",
        "Adam of tables",
    ],
)
def test_an_eager_step_takes_the_operations_of_a_plain_one(name: str) -> None:
    found, expected = both(name)
    assert found == expected


@pytest.mark.parametrize("name", ["DLRM of separate modules"])
def test_an_eager_step_with_joined_lookups_takes_fewer(name: str) -> None:
    found, expected = both(name)
    assert found.total() < expected.total()
