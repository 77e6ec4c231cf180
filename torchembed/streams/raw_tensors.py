"""Tensors as the bytes of their elements, and back."""

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of all elements, in order; waits for a GPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_of(data: bytes, dtype: torch.dtype) -> Tensor:
    """The elements ``[n]`` that ``data`` has; a copy, aligned as torch wants it."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
