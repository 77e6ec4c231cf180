"""Checks of arguments, whose errors name the argument, what is required, what came, what to do."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], advice: str) -> None:
    """Raise ``TypeError`` unless ``tensor.dtype`` is in ``allowed``."""
    if tensor.dtype not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        raise TypeError(f"{name} must be {names}, got {dtype_name(tensor.dtype)}; {advice}")


def check_ids(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` is a one-dimensional int32 or int64 tensor."""
    check_dtype(name, tensor, ID_DTYPES, "call .long()")
    check_dim(name, tensor, 1)


def check_float(name: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` unless ``tensor`` is float32, float16 or bfloat16."""
    check_dtype(name, tensor, FLOAT_DTYPES, "call .float()")


def check_dim(name: str, tensor: Tensor, dim: int) -> None:
    """Raise ``ValueError`` unless ``tensor`` has ``dim`` dimensions."""
    if tensor.dim() != dim:
        raise ValueError(
            f"{name} must have {dim} dimension(s), got shape {tuple(tensor.shape)}; reshape it"
        )


def check_numel(name: str, tensor: Tensor, numel: int, meaning: str) -> None:
    """Raise ``ValueError`` unless ``tensor`` holds ``numel`` elements; ``meaning`` says which."""
    if tensor.numel() != numel:
        raise ValueError(f"{name} must hold {numel} elements ({meaning}), got {tensor.numel()}")


def check_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """Raise ``ValueError`` unless every given tensor is on the device of ``first``."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(
                f"{name} must be on {first.device} as {first_name} is, got {tensor.device}; "
                f"call .to('{first.device}')"
            )
