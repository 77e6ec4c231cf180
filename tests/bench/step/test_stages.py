"""The stages of a step that kernels belong to."""

import pytest

from bench.step.stages import stage_of_kernel


@pytest.mark.parametrize(
    ("kernel", "part", "stage"),
    [
        ("_pooled_lookup_forward_kernel", "forward", "lookup"),
        ("_pooled_lookup_gradient_map_kernel", "backward", "ids"),
        ("_find_runs_kernel", "rows", "ids"),
        ("_rowwise_update_kernel", "rows", "row update"),
        ("void at::native::fill", "rows", "row update"),
        ("ncclDevKernel_SendRecv", "backward", "exchange"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "backward", "mean"),
        ("nvjet_sm90_tst", "forward", "dense forward"),
        ("nvjet_sm90_tst", "backward", "dense backward"),
        ("_dense_update_kernel", "dense", "dense update"),
    ],
)
def test_stages(kernel: str, part: str, stage: str) -> None:
    assert stage_of_kernel(kernel, part) == stage
