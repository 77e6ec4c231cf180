"""Processes stay on processors near their GPU."""

import os

import pytest
import torch

from torchembed.training.affinity import parsed_processors, processors_near, stay_near


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5,9", {0, 1, 4, 5, 9})],
)
def test_lists_of_processors(text: str, numbers: set[int]) -> None:
    assert parsed_processors(text) == numbers


def test_on_the_cpu_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    stay_near(torch.device("cpu"))
    assert os.sched_getaffinity(0) == before


@pytest.mark.gpu
def test_a_process_stays_near_its_gpu(device: torch.device) -> None:
    before = os.sched_getaffinity(0)
    try:
        stay_near(device)
        after = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
    assert after == (processors_near(torch.device("cuda", 0)) & before or before)
