"""A lane runs the kernels that it exists to run."""

import pytest
import torch

import torchembed.ops.linearize_ids
import torchembed.ops.pooled_lookup
import torchembed.ops.segments
import torchembed.ops.sequence_lookup  # noqa: F401
from tests import lanes

LOOKUP_OPS = (
    "linearize_ids",
    "find_runs",
    "pooled_lookup_forward",
    "pooled_lookup_gradient_map",
    "pooled_lookup_weights_backward",
    "sequence_lookup_forward",
    "rowwise_update",
)


@pytest.mark.parametrize("op", LOOKUP_OPS)
def test_the_lane_runs_its_kernels(op: str, device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    assert lanes.picked_kernel(op, device) == lane
