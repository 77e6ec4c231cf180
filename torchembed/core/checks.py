"""Checks of arguments; errors name the argument, the requirement, the value and the remedy."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``, and so on, for errors."""
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


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` unless ``tensor`` is contiguous, as kernels read it."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; call .contiguous()")


def check_matrix(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` is a contiguous matrix of float32, float16 or bfloat16."""
    check_float(name, tensor)
    check_dim(name, tensor, 2)
    check_contiguous(name, tensor)


def check_not_negative(name: str, value: int) -> None:
    """Raise ``ValueError`` for a negative ``value``."""
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def check_output_dtype(dtype: torch.dtype) -> None:
    """Raise ``TypeError`` unless ``dtype`` is float32, float16 or bfloat16."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"output_dtype must be float32, float16 or bfloat16, got {dtype}")


def check_numel(name: str, tensor: Tensor, numel: int, meaning: str) -> None:
    """Raise ``ValueError`` unless ``tensor`` holds ``numel`` elements; ``meaning`` explains that
    number in the error."""
    if tensor.numel() != numel:
        raise ValueError(f"{name} must hold {numel} elements ({meaning}), got {tensor.numel()}")


def check_scalars(**scalars: Tensor | None) -> None:
    """Raise unless every given tensor is float32 and holds one element."""
    for name, scalar in scalars.items():
        if scalar is not None:
            check_dtype(name, scalar, (torch.float32,), "call .float()")
            check_numel(name, scalar, 1, "a scalar in a tensor")


def check_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """Raise ``ValueError`` unless every given tensor is on the device of ``first``."""
    device = first.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on {device} as {first_name} is, got {tensor.device}; "
                f"call .to('{device}')"
            )
