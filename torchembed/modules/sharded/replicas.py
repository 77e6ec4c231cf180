"""Parameters and buffers that every rank holds whole, made equal on all; finds sparse gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.modules.sharded.sharded_collection import ShardedCollection
from torchembed.modules.single_table import SingleTable
from torchembed.ops.row_gradients import WeightGradient


def is_plain(tensor: Tensor) -> bool:
    """False for sparse and nested tensors, which have no memory that collectives take."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_parameters(model: nn.Module) -> None:
    """Raise ``ValueError`` for a parameter whose gradient cannot be averaged over ranks."""
    for name, parameter in model.named_parameters():
        if not is_plain(parameter):
            kind = "nested" if parameter.is_nested else str(parameter.layout)
            raise ValueError(
                f"parameter {name} must be dense to be trained on several ranks, got {kind}; hold "
                "its values in a dense parameter, and make the other tensor of them in forward"
            )
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} must be real to be trained on several ranks, got "
                f"{parameter.dtype}; hold torch.view_as_real of it in a parameter, and call "
                "torch.view_as_complex in forward"
            )


def with_sparse_gradients(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that every rank holds and to which lookups give sparse gradients."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | SingleTable) and module.sparse:
            found.append(module.weight)
        elif isinstance(module, ShardedCollection) and module.weight_form is WeightGradient.SPARSE:
            tables = module.table_set.tables
            found += [table.parameter for table in tables if not table.is_sharded]
    return list(dict.fromkeys(found))


def copy_from_first(tensors: list[Tensor], model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make ``tensors`` and the model's buffers those of the first rank of ``group``. Collective.

    Sparse and nested buffers are replaced, since the ranks' may differ in size; others are changed
    in place.
    """
    first = dist.get_global_rank(group, 0)
    for tensor in [*tensors, *filter(is_plain, model.buffers())]:
        dist.broadcast(tensor, src=first, group=group)
    received: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or is_plain(buffer):
                continue
            if buffer not in received:
                one = [buffer.cpu()]
                dist.broadcast_object_list(one, src=first, group=group)
                received[buffer] = one[0].to(buffer.device)
            module._buffers[name] = received[buffer]
