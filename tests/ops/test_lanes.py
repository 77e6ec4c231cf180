"""A lane runs the kernels that it exists to run."""

import importlib
import pkgutil

import pytest
import torch

import torchembed.ops
from tests.support import lanes
from torchembed.core.dispatch import picked_kernels

OPS_WITH_A_NATIVE_KERNEL = (
    "initialize_rows",
    "linearize_ids",
    "find_runs",
    "pooled_lookup_forward",
    "pooled_lookup_gradient_map",
    "pooled_lookup_weights_backward",
    "sequence_lookup_forward",
    "rowwise_update",
    "find_slots",
    "touch_slots",
    "insert_keys",
    "erase_keys",
    "claim_slots",
    "exchange_places",
    "find_cached",
    "move_rows",
    "read_rows",
)


def test_the_lane_runs_its_kernels(device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    for module in pkgutil.iter_modules(torchembed.ops.__path__):
        importlib.import_module(f"torchembed.ops.{module.name}")
    defined = {pick.op for pick in picked_kernels}
    assert defined.issuperset(OPS_WITH_A_NATIVE_KERNEL)
    exercised = OPS_WITH_A_NATIVE_KERNEL if lane == "native" else sorted(defined)
    assert {op: lanes.picked_kernel(op, device) for op in exercised} == dict.fromkeys(
        exercised, lane
    )
