"""The cost of a step's dense part, which every rank holds whole."""

import dataclasses
from typing import NamedTuple

import torch

from torchembed.sharding.planning.bucket_size import bucket_bytes, bytes_of_a_meeting
from torchembed.sharding.planning.costs import CostModel
from torchembed.sharding.planning.load_seconds import ALL_REDUCE_EXCHANGES

FORWARD_KERNELS, BACKWARD_KERNELS = 0.85, 1.5
"""Kernel launches of each layer, in units of `kernel_seconds`."""
TF32_SHARE, FLOAT32_SHARE = 0.32, 0.083
"""Rates of TF32 and float32 matrix products, as shares of that of 16-bit ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseUse:
    """The parameters of a model that are not tables, and how a step computes with them."""

    num_parameters: int
    num_layers: int
    """Number of weight matrices, each of which every sample is multiplied with once."""
    num_weights: int
    """Elements of those matrices."""
    dtype: torch.dtype
    """Dtype of matrix products and of gradients."""
    allows_tf32: bool = False
    """True if float32 products may be computed in TF32."""


class DenseCost(NamedTuple):
    """Seconds of a step's stages, each alone."""

    forward_seconds: float
    backward_seconds: float
    mean_seconds: float
    """Seconds of averaging the gradients over ranks."""
    update_seconds: float
    num_buckets: int
    """Buckets in which several ranks average them."""


def dense_cost(use: DenseUse, model: CostModel) -> DenseCost:
    """The cost of ``use`` with the batches and ranks of ``model``, and an optimizer of its kind."""
    topology, itemsize = model.topology, use.dtype.itemsize
    share = 1.0
    if itemsize > 2:
        share = TF32_SHARE if use.allows_tf32 else FLOAT32_SHARE
    # Each weight multiplies and adds, once in forward, and in backward for each of two gradients.
    forward = 2 * use.num_weights * model.batch_size / (share * topology.flops)
    fixed = use.num_layers * topology.kernel_seconds
    own = use.num_parameters * itemsize
    sent = use.num_parameters * (model.wire.dense or use.dtype).itemsize
    num_buckets = -(-own // bucket_bytes(own, sent, bytes_of_a_meeting(topology)))
    mean = 0.0
    if topology.num_ranks > 1:
        mean = model.all_reduce_seconds(sent)
        mean += num_buckets * ALL_REDUCE_EXCHANGES * topology.collective_seconds
    # Gradient, master and state; 16-bit parameters are rounded copies of masters.
    update = itemsize + 8 * (1 + model.rule.num_states) + (itemsize if itemsize < 4 else 0)
    return DenseCost(
        forward_seconds=forward + FORWARD_KERNELS * fixed,
        backward_seconds=2 * forward + BACKWARD_KERNELS * fixed,
        mean_seconds=mean,
        update_seconds=update * use.num_parameters / topology.memory_bandwidth
        + topology.kernel_seconds,
        num_buckets=num_buckets,
    )
