"""Placements of tables that torchembed alone has, in TorchRec's plans."""

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

SHARDING_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)
"""Sharding types that such a table may have."""


def unsupported_placement(sharding_type: str, compute_kernel: str) -> str | None:
    """The part of a placement that such a table may not have; None where it may be placed so."""
    if sharding_type not in SHARDING_TYPES:
        return f"sharding type {sharding_type}"
    if compute_kernel != EmbeddingComputeKernel.FUSED.value:
        return f"compute kernel {compute_kernel}"
    return None


def refuse_placement(table: str, reason: str) -> None:
    """Raise the error of a plan, or constraints, for ``table``, as errors describe it."""
    raise ValueError(
        f"{table} must have one of the sharding types {', '.join(SHARDING_TYPES)} and compute "
        f"kernel {EmbeddingComputeKernel.FUSED.value}, got {reason}; give the planner "
        "ParameterConstraints of the table with such sharding_types and compute_kernels, or none, "
        "and the table an optimizer in backward"
    )


def check_placement(table: str, sharding_type: str, compute_kernel: str) -> None:
    """Raise ``ValueError`` where ``table``, as errors describe it, may not be placed so."""
    reason = unsupported_placement(sharding_type, compute_kernel)
    if reason is not None:
        refuse_placement(table, reason)
