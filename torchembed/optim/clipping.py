"""Clipping by the global norm where some parameters are tables with recorded gradients."""

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.tables import Table, TableGroup, joined_where_whole, table_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``; returns that norm.

    Like ``torch.nn.utils.clip_grad_norm_``, and it counts the gradients that fused optimizers have
    recorded for tables: each row's summed gradient once. Never synchronizes where all gradients are
    dense or recorded. The tables of a group are clipped as one, so give all of them.

    Args:
        parameters: dense parameters and table weights, on one device; or one of them.
        max_norm: the bound, not negative.
        group: the ranks over which tables are sharded. All of them call this with all parameters of
            the model, after backward; the norm is then of all ranks' rows, and the same on each.

    Returns:
        The norm before clipping, float32 ``[]``, or float64 where a gradient is.

    Raises:
        ValueError: for a negative ``max_norm``.
        RuntimeError: for sharded tables without ``group``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative, got {max_norm}")
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    sharded = next((table for table in map(table_of, given) if _is_sharded(table)), None)
    if sharded is not None and group is None:
        raise RuntimeError(
            f"table {sharded.spec.name} is sharded, and the norm of its gradient spans the ranks; "
            "pass group=, the ranks of its mesh, on all of them, or let "
            "TrainPipeline(max_grad_norm=...) clip"
        )
    return clip_gradients(given, max_norm, device=_device_of(given, group), group=group)


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[Tensor],
    max_norm: float,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """:func:`clip_grad_norm_` on ``device``, also for a rank that holds no parameter. Collective
    over ``group``, also where no table is sharded."""
    groups: dict[TableGroup, Table] = {}
    dense: list[Tensor] = []
    of_shards: list[Tensor] = []
    for parameter in dict.fromkeys(parameters):
        table = table_of(parameter)
        if table is not None and table.group.rule is not None:
            groups[table.group.joined or table.group] = table
        elif parameter.grad is not None:
            (of_shards if _is_sharded(table) else dense).append(_elements(parameter))
    updated = {group: group.tables[0] for group in joined_where_whole(groups)}
    # What every rank holds counts once, and shards on the rank that has them.
    norms = _norms(dense) + [_norm(g) for g, table in updated.items() if not table.is_sharded]
    square = _sum_of_squares(norms, device)
    if group is not None:
        norms = _norms(of_shards) + [_norm(g) for g, table in updated.items() if table.is_sharded]
        over_ranks = _sum_of_squares(norms, device).float()
        dist.all_reduce(over_ranks, group=group)
        square = square + over_ranks
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in _by_dtype([*dense, *of_shards]):
        torch._foreach_mul_(gradients, factor)  # type: ignore[attr-defined]
    for table_group in updated:
        table_group.gathered_pending().scale(factor.float())
    return norm


def _is_sharded(table: Table | None) -> bool:
    return table is not None and table.is_sharded


def _device_of(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> torch.device:
    if parameters:
        return parameters[0].device
    # Without a parameter, where the others' are.
    is_on_gpus = group is not None and "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpus else torch.device("cpu")


def _elements(parameter: Tensor) -> Tensor:
    """The gradient of ``parameter``; of a sparse one, which becomes coalesced, its values."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad.values()


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """``tensors`` in lists of one dtype each, which one kernel takes."""
    ordered = sorted(tensors, key=lambda tensor: str(tensor.dtype))
    return [list(members) for _, members in itertools.groupby(ordered, lambda t: t.dtype)]


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each of ``gradients``, float32 ``[]``; of one in float64 likewise."""
    norms: list[Tensor] = []
    for members in _by_dtype(gradients):
        dtype = torch.promote_types(members[0].dtype, torch.float32)
        norms += torch._foreach_norm(members, 2, dtype=dtype)  # type: ignore[attr-defined]
    return norms


def _norm(group: TableGroup) -> Tensor:
    """The norm of the group's summed row gradients, float32 ``[]``."""
    summed = group.gathered_pending().summed()
    if summed is None:
        return torch.zeros((), device=group.weight.device)
    return torch.linalg.vector_norm(summed[1])


def _sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), device=device)
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.stack([norm.to(widest) for norm in norms]).square().sum()
