"""Tensors over part of a larger one's memory that look to others like tensors of their own."""

import torch
from torch import Tensor


def with_own_storage(part: Tensor) -> Tensor:
    """A tensor over the memory of ``part``, whose storage begins and ends where ``part`` does.

    What writes files (safetensors, accelerate, transformers) takes tensors of one storage for one
    tensor under several names and keeps one of them; ``torch.save`` writes whole storages. Neither
    sees here that ``part`` lies beside others. Nothing is copied: writes to one are writes to the
    other, and the memory stays as long as either does. Version counters are apart.

    Args:
        part: contiguous, without gradient.

    Returns:
        ``part`` itself where its storage holds nothing else; where it has no elements; and where it
        has no memory that can be passed on, as on the meta device and of a fake tensor, or shares
        it with other processes, which a storage of its own would hide.
    """
    if (
        type(part) is not Tensor  # but a stand-in, without memory
        or part.device.type not in ("cpu", "cuda")
        or part.numel() == 0
        or part.untyped_storage().nbytes() == part.nbytes
        or (part.device.type == "cpu" and part.is_shared())
    ):
        return part
    with torch.no_grad():
        return torch.from_dlpack(part)
