"""Recording of row gradients in the backward of programs of ``torch.compile``.

A compiler traces no function that changes Python objects, such as the gradients that a group has
pending, but calls an operation that does so when the program runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.ops.rowwise_update import RowGradients
from torchembed.tables import table_at


def _record(
    weights: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    tables = [table_at(weight) for weight in weights]
    group = tables[0].group if tables[0] is not None else None
    if group is None or group.rule is None or group.tables != tables:
        raise RuntimeError(
            f"weights must be the {len(weights)} tables of one group with a fused optimizer where "
            "a program of torch.compile records their gradients, and have other memory; call the "
            "module once outside of torch.compile after replacing .data of a parameter"
        )
    rows = _without_frozen(rows, weights)
    # Operations may keep neither their arguments' memory nor give it away: a program may reuse it.
    kept = (None if tensor is None else tensor.clone() for tensor in (gradient_rows, scales))
    group.record(rows.clone(), RowGradients(grad.clone(), *kept))
    return torch.zeros(1, device="cpu")


def _without_frozen(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``rows``, numbered through ``weights``, with -1 for those of frozen tables: a program of
    torch 2.11 is not compiled anew where a parameter is frozen."""
    first = 0
    for weight in weights:
        table = table_at(weight)
        end = first + len(weight)
        if table is not None and not table.parameter.requires_grad:
            rows = torch.where((rows >= first) & (rows < end), -1, rows)
        first = end
    return rows


def _fake(
    weights: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    gradient_rows: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    return grad.new_empty(1, dtype=torch.float32, device="cpu")


record_op = torch.library.custom_op(
    "torchembed::record_row_gradients",
    _record,
    mutates_args=(),
    schema="(Tensor[] weights, Tensor rows, Tensor grad, Tensor? gradient_rows, Tensor? scales)"
    " -> Tensor",
    # The replay of a graph would record nothing.
    tags=(torch.Tag.cudagraph_unsafe,),
)
record_op.register_fake(_fake)
"""Gives the gradients of ``rows`` to the fused optimizer of ``weights``, as ``TableGroup.record``
does.

Args:
    weights: the parameters of a group's tables, in its order.
    rows: ``[L]``, of the group; -1 for none.
    grad, gradient_rows, scales: as of ``RowGradients``.

Returns:
    The gradient of the group's ``anchor``.

Raises:
    RuntimeError: where the tables have other memory by now.
"""
