"""Which kernels a test run is there to exercise.

A lane is one way to run the same tests: ``reference`` (eager torch, TORCHEMBED_FORCE_REFERENCE=1),
``native`` (the C++ library) or ``triton`` (the Triton kernels: through the interpreter on the CPU,
or compiled on a GPU). TORCHEMBED_LANE names it, and then a test run that silently exercises other
kernels fails; where it is unset, the tests run on whatever is picked.
"""

import os

import torch

from torchembed.core.dispatch import picked_kernels

LANES = ("reference", "native", "triton")


def required_lane() -> str | None:
    """The lane that TORCHEMBED_LANE asks for, or None where it asks for none."""
    lane = os.environ.get("TORCHEMBED_LANE")
    if lane is not None and lane not in LANES:
        raise ValueError(f"TORCHEMBED_LANE must be one of {', '.join(LANES)}, got {lane!r}")
    return lane


def picked_kernel(op: str, device: torch.device | str) -> str:
    """The kernel that ``torchembed::<op>`` runs on ``device``: reference, native or triton."""
    key = torch.device(device).type.upper()
    found = [pick.kernel for pick in picked_kernels if (pick.op, pick.key) == (op, key)]
    assert len(found) == 1, f"torchembed::{op} has {len(found)} picks for {key}; import its room"
    return found[0]


def is_interpreted() -> bool:
    """True where Triton kernels run through the interpreter, thousands of times slower."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
