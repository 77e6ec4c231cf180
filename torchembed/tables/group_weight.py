"""The flat weight of a group as autograd sees it: a function of its tables' parameters."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.autograd.first_order import creates_graph
from torchembed.core.function_context import FunctionContext
from torchembed.core.stand_ins import in_transform
from torchembed.tables.group import TableGroup


class GroupWeight(NamedTuple):
    """The weight that a lookup in a group reads, and where its gradients go."""

    rows: Tensor
    """``[R, D]``."""
    is_recorded: bool
    """True if gradients go to ``group.record``, as the sink of a lookup, and not to ``rows``."""


def _split_sparse(grad: Tensor, first_rows: list[int]) -> list[Tensor]:
    """Per-table sparse gradients of a group's uncoalesced sparse gradient.

    How many entries each table has is found on the host: where ``grad`` is on a GPU this waits.
    """
    if creates_graph():
        # Only these can be differentiated.
        grad = grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
    else:
        rows, values = grad._indices()[0], grad._values()
    parts = []
    for first, last in itertools.pairwise(first_rows):
        inside = (rows >= first) & (rows < last)
        indices = (rows[inside] - first).unsqueeze(0)
        shape = (last - first, *grad.shape[1:])
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            parts.append(torch.sparse_coo_tensor(indices, values[inside], shape))
    return parts


class _GroupWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionContext, weight: Tensor, first_rows: list[int], *parameters: Tensor
    ) -> Tensor:
        ctx.first_rows = first_rows
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return weight.detach()

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Any, ...]:
        # By operations of PyTorch, which can be differentiated.
        if grad.is_sparse:
            parts = _split_sparse(grad, ctx.first_rows)
        else:
            parts = [grad[a:b] for a, b in itertools.pairwise(ctx.first_rows)]
        of_tables = (part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True))
        return None, None, *of_tables


class _Anchor(torch.autograd.Function):
    """The flat weight, made to require gradients by a parameter that itself gets none."""

    @staticmethod
    def forward(ctx: FunctionContext, parameter: Tensor, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # or autograd fills zeros of the whole weight's size
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, grad: None) -> tuple[None, None]:
        return None, None


def group_weight(group: TableGroup, weight: Tensor | None = None) -> GroupWeight:
    """``group.weight [R, D]``, or the ``weight`` that is read in place of it, so connected that
    lookups from it train the tables.

    Without an update rule, gradients reach each table's parameter. With one, a lookup passes
    ``group.record`` as its sink and the parameters get none. Where modules hold other tensors in
    place of parameters (``torch.func.functional_call``, parametrizations, pruning), these are read
    and get the gradients; of several tables they are copied into one for each call.

    Raises:
        ValueError: if such a tensor has another shape than its table.
        RuntimeError: if gradients would have to be recorded and cannot be: inside a transform of
            ``torch.func``, or where others of the group's tables hold such tensors.
    """
    weight = group.weight if weight is None else weight
    parameters: list[Tensor] = [table.parameter for table in group.tables]
    is_trained = torch.is_grad_enabled() and parameters[0].requires_grad
    if not all(table.holds_parameter() for table in group.tables):
        return GroupWeight(_given_weight(group, is_recorded=is_trained), False)
    if not is_trained:
        return GroupWeight(weight, False)
    if group.rule is not None or weight is not group.weight:
        if in_transform():
            raise RuntimeError(
                f"tables {_names(group)} are updated by an optimizer of torchembed's, which cannot "
                "record gradients inside a transform of torch.func; pass their weights by "
                "torch.func.functional_call, or freeze them by requires_grad_(False)"
            )
        return GroupWeight(_Anchor.apply(parameters[0], weight), True)
    if in_transform():
        return GroupWeight(torch.cat(parameters) if len(parameters) > 1 else parameters[0], False)
    return GroupWeight(_GroupWeight.apply(group.weight, group.first_rows, *parameters), False)


def _given_weight(group: TableGroup, *, is_recorded: bool) -> Tensor:
    """The weights that the modules hold for the group's tables, one after the other.

    Args:
        is_recorded: whether the group's optimizer, if it has one, is to train what is not given.
    """
    kept = [table.spec.name for table in group.tables if table.holds_parameter()]
    if kept and is_recorded and group.rule is not None:
        raise RuntimeError(
            f"weights of some of the tables {_names(group)} were given for this call (by "
            "torch.func.functional_call, a parametrization or pruning), while an optimizer of "
            f"torchembed's updates others of them, {', '.join(kept)}, in one pass with these; give "
            "all of them, or make the optimizer without the former"
        )
    given = [table.held_weight() for table in group.tables]
    for table, weight in zip(group.tables, given, strict=True):
        if tuple(weight.shape) != (table.num_rows, table.num_columns):
            raise ValueError(
                f"weight of table {table.spec.name} must have shape "
                f"{(table.num_rows, table.num_columns)}, got {tuple(weight.shape)}"
            )
    if len(given) == 1:
        return given[0]
    joined = torch.cat(given)
    if in_transform() or not joined.requires_grad:
        return joined
    # Unlike torch's cat, it takes a sparse gradient.
    return _GroupWeight.apply(joined.detach(), group.first_rows, *given)


def _names(group: TableGroup) -> str:
    return ", ".join(table.spec.name for table in group.tables)
