"""Clipping by the global norm where some parameters are tables with recorded gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from torchembed.ops.row_gradients import summed_gradients
from torchembed.tables import TableGroup, table_of


def _squared_norm(group: TableGroup) -> Tensor:
    """Sum of squares of the group's summed row gradients, float32 ``[]``."""
    entry = group.merged_pending()
    if entry is None:
        return torch.zeros((), device=group.weight.device)
    return summed_gradients(entry.runs(group.num_rows), entry.gradients).square().sum()


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``; returns that norm.

    Like ``torch.nn.utils.clip_grad_norm_``, and it counts the gradients that fused optimizers have
    recorded for tables: each row's summed gradient once. Never synchronizes where all gradients are
    dense or recorded. The tables of a group are clipped as one, so give all of them.

    Args:
        parameters: dense parameters and table weights, on one device; or one of them.
        max_norm: the bound, not negative.

    Returns:
        The norm before clipping, float32 ``[]``.

    Raises:
        ValueError: for a negative ``max_norm``.
        RuntimeError: for sharded tables, whose norm spans the ranks.
    """
    if max_norm < 0:
        raise ValueError(f"max_norm must not be negative, got {max_norm}")
    groups: dict[int, TableGroup] = {}
    grads = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        table = table_of(parameter)
        if table is not None and table.is_sharded:
            raise RuntimeError(
                f"table {table.spec.name} is sharded, and the norm of its gradient spans the "
                "ranks; clip by value instead (max_gradient of the optimizer)"
            )
        if table is not None and table.group.rule is not None:
            groups[id(table.group)] = table.group
        elif parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            grads.append(parameter.grad.values())
        elif parameter.grad is not None:
            grads.append(parameter.grad)
    squares = [grad.float().square().sum() for grad in grads]
    squares += [_squared_norm(group) for group in groups.values()]
    if not squares:
        return torch.zeros(())
    norm = torch.stack(squares).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)
    for group in groups.values():
        group.scale_pending(factor)
    return norm
