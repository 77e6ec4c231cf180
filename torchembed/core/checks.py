"""Checks of arguments; errors name the argument, the requirement, the value and the remedy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.core.stand_ins import is_stand_in

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)
_ANY_ID_DTYPES = (*ID_DTYPES, torch.uint32, torch.uint64)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``, and so on, for errors."""
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], advice: str) -> None:
    """Raise ``TypeError`` unless ``tensor`` is a tensor whose dtype is in ``allowed``."""
    if getattr(tensor, "dtype", None) not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        if not isinstance(tensor, Tensor):
            given = type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of {names}, got {given}; call torch.tensor()")
        raise TypeError(f"{name} must be {names}, got {dtype_name(tensor.dtype)}; {advice}")


def check_ids(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` is a one-dimensional int32 or int64 tensor."""
    check_dtype(name, tensor, ID_DTYPES, "call .long()")
    check_dim(name, tensor, 1)


def signed_ids(name: str, ids: Tensor) -> Tensor:
    """``ids`` as int32 or int64: :func:`as_signed` of them.

    Raises:
        TypeError: for another dtype than these, uint32 and uint64.
    """
    check_dtype(name, ids, _ANY_ID_DTYPES, "call .long()")
    return as_signed(ids)


def as_signed(tensor: Tensor) -> Tensor:
    """``tensor`` as int64 where it is uint32, by its values, or uint64, by its bits and in the same
    memory; else itself. torch has few operations on these dtypes."""
    if tensor.dtype is torch.uint64:
        return tensor.view(torch.int64)
    return tensor.long() if tensor.dtype is torch.uint32 else tensor


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
    """Raise ``ValueError`` unless ``tensor`` is contiguous, as kernels read it, or a stand-in: a
    compiler may pad the rows of what that stands for, and then copies it for an operation."""
    if not tensor.is_contiguous() and not is_stand_in(tensor):
        raise ValueError(f"{name} must be contiguous; call .contiguous()")


def check_whole_rows(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` unless ``tensor`` is a matrix whose rows are contiguous, with gaps
    between them or without."""
    check_dim(name, tensor, 2)
    if not tensor.is_contiguous() and tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must have contiguous rows, got strides {tensor.stride()}; call .contiguous()"
        )


def check_apart_rows(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` unless the rows of ``tensor``, of one dimension or more, are contiguous,
    and none overlaps another one."""
    if tensor.is_contiguous():
        return
    if not tensor[:1].is_contiguous() or tensor.stride(0) < tensor.shape[1:].numel():
        raise ValueError(
            f"{name} must have contiguous rows that do not overlap, got shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; call .contiguous()"
        )


def check_matrix(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` is a contiguous matrix of float32, float16 or bfloat16."""
    check_float(name, tensor)
    check_dim(name, tensor, 2)
    check_contiguous(name, tensor)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ``ValueError`` unless ``tensor`` has ``shape``; ``meaning`` explains it in the
    error."""
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} ({meaning}), got {tuple(tensor.shape)}"
        )


def check_operand(
    name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str, like_name: str, like: Tensor
) -> None:
    """Raise unless ``tensor`` is contiguous, has ``shape``, and has the dtype and the device of
    ``like``."""
    if tensor.dtype is not like.dtype:
        raise TypeError(
            f"{name} must be {dtype_name(like.dtype)} as {like_name} is, "
            f"got {dtype_name(tensor.dtype)}; cast one of them"
        )
    check_memory(name, tensor, shape, meaning, like_name, like)


def check_memory(
    name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str, like_name: str, like: Tensor
) -> None:
    """Raise ``ValueError`` unless ``tensor`` is contiguous, has ``shape``, and is on the device of
    ``like``."""
    # Each call of a check costs the host a tenth of a microsecond: only what fails calls them.
    if tensor.shape != shape or tensor.device != like.device or not tensor.is_contiguous():
        check_shape(name, tensor, shape, meaning)
        check_same_device(like_name, like, **{name: tensor})
        check_contiguous(name, tensor)


def check_rank(name: str, rank: int, num_ranks: int) -> None:
    """Raise ``ValueError`` unless ``rank`` is in ``[0, num_ranks)``."""
    if not 0 <= rank < num_ranks:
        raise ValueError(f"{name} must be in [0, {num_ranks}), the ranks, got {rank}")


def check_not_negative(name: str, value: int) -> None:
    """Raise ``ValueError`` for a negative ``value``."""
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def reaches(number: int, limit: int) -> bool:
    """True where ``number`` is ``limit`` or more; False for a variable of a tracer, whose program
    would otherwise be for smaller numbers alone: its value is compared when the program runs."""
    return isinstance(number, int) and number >= limit


def check_output_dtype(dtype: torch.dtype) -> None:
    """Raise ``TypeError`` unless ``dtype`` is float32, float16 or bfloat16."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"output_dtype must be float32, float16 or bfloat16, got {dtype}")


def check_autocast(autocast: object) -> None:
    """Raise ``TypeError`` unless ``autocast`` is a dtype, in which to compute, or None."""
    if not (autocast is None or isinstance(autocast, torch.dtype)):
        raise TypeError(f"autocast must be a dtype, as torch.bfloat16, or None, got {autocast!r}")


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


def check_reachable(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ``ValueError`` unless kernels on the device of ``like`` can access ``tensor``: it is on
    that device, or in pinned memory of the host where that device is a GPU."""
    # A stand-in never says that it is pinned.
    if tensor.device != like.device and not (
        like.is_cuda and tensor.is_cpu and (is_stand_in(tensor) or tensor.is_pinned())
    ):
        raise ValueError(
            f"{name} must be on the device of {like_name}, {like.device}, or in pinned memory of "
            f"the host for a GPU, got {tensor.device}"
        )
