"""Parameters that share a storage, in a layout that others rely on."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def shared_storages(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters that are parts of larger storages, those of one storage together.

    The weights of ``torch.nn.LSTM``, ``GRU`` and ``RNN`` on a GPU are views of one storage, which
    begins with the first of them and holds each where cuDNN expects it. Elsewhere torch warns, and
    copies them there at each call.

    Args:
        parameters: on one device. Those of a storage in which two of them overlap are left out.
    """
    by_storage: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        storage = parameter.untyped_storage()
        is_part = 0 < parameter.numel() * parameter.element_size() < storage.nbytes()
        if is_part and parameter.is_contiguous():
            by_storage.setdefault((storage.data_ptr(), parameter.dtype), []).append(parameter)
    return [members for members in by_storage.values() if not _overlap(members)]


def _overlap(members: Sequence[Tensor]) -> bool:
    in_order = sorted(members, key=Tensor.storage_offset)
    return any(
        one.storage_offset() + one.numel() > other.storage_offset()
        for one, other in itertools.pairwise(in_order)
    )


def cast_shared(members: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Give parameters of one storage their values in ``dtype``, at the same places of a new storage
    where they have another dtype."""
    first = members[0]
    if first.dtype is dtype:
        return
    size = first.untyped_storage().nbytes() // first.element_size()
    whole = torch.zeros(size, dtype=dtype, device=first.device)
    for parameter in members:
        start = parameter.storage_offset()
        part = whole[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = part.copy_(parameter.detach())
