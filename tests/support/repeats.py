"""Determinism: the same bits on every call, and with any number of threads."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits


def assert_repeats(function: Callable[[], Iterable[Tensor]]) -> None:
    """Assert that ``function`` gives the same bits again, under 1, 2 and 3 CPU threads.

    ``function`` makes its own copies of what it changes.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = list(function())
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for expected, result in zip(first, function(), strict=True):
                assert_same_bits(result, expected)
    finally:
        torch.set_num_threads(threads)
