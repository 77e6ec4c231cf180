"""Tensors over part of another tensor's memory with a storage that ends where they do."""

import torch
from torch import Tensor


def with_own_storage(part: Tensor) -> Tensor:
    """A tensor over the memory of ``part``, whose storage begins and ends where ``part`` does.

    Libraries that write files (safetensors, accelerate, transformers) take tensors of one storage
    for one tensor under several names, and keep one of them; ``torch.save`` writes whole storages.
    Nothing is copied: writes to one are writes to the other, and the memory lives as long as either
    does. Version counters are separate.

    Args:
        part: without gradient; there may be gaps between its rows.

    Returns:
        ``part`` itself where its storage holds nothing else; where it has no elements; and where it
        has no memory that can be passed on, as on the meta device and of a fake tensor, or shares
        it with other processes, which a storage of its own would hide.
    """
    if (
        type(part) is not Tensor  # a fake or functional tensor, without memory
        or part.device.type not in ("cpu", "cuda")
        or part.numel() == 0
        or part.untyped_storage().nbytes() == part.nbytes
        or (part.device.type == "cpu" and part.is_shared())
    ):
        return part
    with torch.no_grad():
        return torch.from_dlpack(part)
