"""The states of the random generators that a rank draws from."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of torch's generators for the CPU and this rank's CUDA device, of Python's and of
    numpy's."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the one that a program may draw from
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what :func:`random_state` returned; CUDA's where both have one."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - likewise
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
