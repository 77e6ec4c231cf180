"""The flat weight of a group as autograd sees it: a function of its tables' parameters."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.tables.group import TableGroup


def _split_sparse(grad: Tensor, first_rows: list[int]) -> list[Tensor]:
    """Per-table sparse gradients of a group's uncoalesced sparse gradient.

    How many entries each table has is found on the host: where ``grad`` is on a GPU this waits.
    """
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
    def forward(ctx: Any, group: TableGroup, *parameters: Tensor) -> Tensor:
        ctx.first_rows = group.first_rows
        return group.weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if grad.is_sparse:
            return None, *_split_sparse(grad, ctx.first_rows)
        first_rows = ctx.first_rows
        return None, *(grad[a:b] for a, b in itertools.pairwise(first_rows))


class _Anchor(torch.autograd.Function):
    """The flat weight, made to require gradients by a parameter that itself gets none."""

    @staticmethod
    def forward(ctx: Any, group: TableGroup, parameter: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # or autograd fills zeros of the whole weight's size
        return group.weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> tuple[None, None]:
        return None, None


def group_weight(group: TableGroup) -> Tensor:
    """``group.weight [R, D]``, so connected that lookups from it train the tables.

    Without an update rule, gradients reach each table's parameter. With one, a lookup passes
    ``group.record`` as its sink and the parameters get none.
    """
    parameters = [table.parameter for table in group.tables]
    if not (torch.is_grad_enabled() and parameters[0].requires_grad):
        return group.weight
    if group.rule is not None:
        return _Anchor.apply(group, parameters[0])
    return _GroupWeight.apply(group, *parameters)
