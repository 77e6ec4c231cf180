"""The least time that a step of DLRM-DCNv2 can take on a GPU, from bytes, FLOPs and wires.

Each stage takes the larger of its FLOPs over the tensor cores' rate and its bytes over that of
memory; stages follow one another. The wire's bytes are hidden under all else, as far as they go.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from bench.data import dlrm_dcnv2 as workload
from bench.planning.step_costs import UNDER_AUTOCAST
from torchembed.data import Batch
from torchembed.modules.dense.float8_linear import LEAST_WIDTH

STATE_ELEMENTS = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": workload.DIM}
"""Numbers of a row's optimizer state."""

_WIDE = (workload.WIDTH, *(width for width in workload.OVER_ARCH if width >= LEAST_WIDTH))
_NUM_WIDE_PARAMETERS = sum(a * b for a, b in itertools.pairwise(_WIDE))
"""Parameters of the layers whose products are in 8 bits for a precision of ``fp8``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak rates of one GPU, a second; ``sharding.planning.topology`` has rates of the kernels."""

    bytes: float
    flops: float
    """bf16, on tensor cores."""
    wire_bytes: float
    """NVLink, each direction."""


RATES = {
    "H100": Rates(bytes=3.0e12, flops=790e12, wire_bytes=370e9),
    "H200": Rates(bytes=4.3e12, flops=790e12, wire_bytes=370e9),
}


def num_unique_rows(batches: Sequence[Batch], device: torch.device) -> int:
    """Rows that a step touches, whose batches these are, one of each rank."""
    size, total = len(batches[0].labels), 0
    parts = [batch.sparse.values.split([size * h for h in workload.HOTNESS]) for batch in batches]
    for of_ranks in zip(*parts, strict=True):
        total += torch.cat(of_ranks).to(device).unique().numel()
    return total


def floor_seconds(
    rates: Rates,
    size: int,
    num_ranks: int,
    num_unique: int,
    *,
    optimizer: str,
    precision: str,
    wire: str,
    rows: str = "fp32",
) -> float:
    """For one of ``num_ranks`` GPUs, the tables' work divided evenly between them.

    Args:
        size: samples of each rank.
        num_unique: rows that all samples touch.
        optimizer, precision, wire, rows: as in :class:`bench.step.setting.StepSetting`.
    """
    num_dense = workload.NUM_DENSE_PARAMETERS
    is_half = precision in UNDER_AUTOCAST
    act_bytes = 2 if is_half else 4
    wire_bytes = {"fp32": 4, "fp8": 1}.get(wire, 2)
    row_bytes = (2 if rows == "bf16" else 4) * workload.DIM
    num_ids = size * sum(workload.HOTNESS)
    vectors = size * len(workload.KEYS) * workload.DIM
    # Rows that several ids share are read once, as far as the cache reaches.
    lookup = min(num_ids, num_unique / num_ranks) * row_bytes + vectors * act_bytes
    state_bytes = 4 * STATE_ELEMENTS[optimizer]
    update = num_unique / num_ranks * 2 * (row_bytes + state_bytes) + vectors * act_bytes
    flops_rate = rates.flops if is_half else rates.flops / 2
    flops = workload.FLOPS_PER_SAMPLE
    if precision == "fp8":
        # Of three products of each layer, two are at twice the rate: all but the weight's gradient.
        flops -= 2 * _NUM_WIDE_PARAMETERS
    dense = max(size * flops / flops_rate, 3 * num_dense * act_bytes / rates.bytes)
    shadow_bytes = 2 if is_half else 0
    states = 0 if optimizer == "sgd" else 2
    dense_update = num_dense * (8 + 4 * states + act_bytes + shadow_bytes)
    on_gpu = dense + (lookup + update + dense_update) / rates.bytes
    away = (num_ranks - 1) / num_ranks
    exchanged = away * (2 * vectors * wire_bytes + 2 * num_dense * act_bytes)
    return max(on_gpu, exchanged / rates.wire_bytes)
