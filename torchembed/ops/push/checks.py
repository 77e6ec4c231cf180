"""Requirements of the operations of exchanges by push on their arguments.

Of the ranks' buffers the first one is looked at, and how many there are: an exchange takes views of
one kind of memory, and a check of each would cost more with each rank.
"""

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.types import COPY_FIELDS
from torchembed.ops.pooled_lookup.checks import check_pooled_lookup_forward

_VECTORS = (1, 2, 4, 8)
_HALF_UNIT = 64
"""Divisor of a half's elements."""


def _check_copies(
    copies: Tensor, max_rows: int, max_columns: int, vector: int, name: str, like: Tensor
) -> None:
    checks.check_dtype("copies", copies, (torch.int64,), "take them from RectangleCopies")
    checks.check_dim("copies", copies, 2)
    shape = (copies.shape[0], COPY_FIELDS)
    checks.check_memory("copies", copies, shape, "the fields of each copy", name, like)
    checks.check_not_negative("max_rows", max_rows)
    checks.check_not_negative("max_columns", max_columns)
    if vector not in _VECTORS:
        raise ValueError(f"vector must be 1, 2, 4 or 8 elements, got {vector}")


def _check_buffer(name: str, buffer: Tensor) -> None:
    checks.check_matrix(name, buffer)
    if buffer.shape[0] != 2 or buffer.shape[1] % _HALF_UNIT:
        raise ValueError(
            f"{name} must have 2 halves of a multiple of {_HALF_UNIT} elements, "
            f"got shape {tuple(buffer.shape)}"
        )


def _check_state(name: str, state: Tensor, like_name: str, like: Tensor) -> None:
    checks.check_dtype(name, state, (torch.int32,), "call .int()")
    checks.check_memory(name, state, (2,), "exchanges that are over, late or not", like_name, like)


def _check_addresses(
    addresses: Tensor, buffers_name: str, buffers: list[Tensor], name: str, like: Tensor
) -> None:
    if not buffers:
        raise ValueError(f"{buffers_name} must hold a tensor of each rank, got none")
    checks.check_dtype("addresses", addresses, (torch.int64,), "call .long()")
    meaning = f"one for each of {buffers_name}"
    checks.check_memory("addresses", addresses, (len(buffers),), meaning, name, like)


def _check_exchange(
    buffers: list[Tensor], addresses: Tensor, state: Tensor, name: str, like: Tensor
) -> None:
    _check_addresses(addresses, "buffers", buffers, name, like)
    _check_buffer("buffers[0]", buffers[0])
    _check_state("state", state, name, like)


def _check_source(source: Tensor) -> None:
    checks.check_float("source", source)
    checks.check_whole_rows("source", source)


def check_push_rectangles(
    source: Tensor,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    buffers: list[Tensor],
    addresses: Tensor,
    state: Tensor,
    scale: float | None,
) -> None:
    _check_source(source)
    _check_copies(copies, max_rows, max_columns, vector, "source", source)
    _check_exchange(buffers, addresses, state, "source", source)


def check_collect_rectangles(
    buffer: Tensor,
    state: Tensor,
    stride: int,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    num_terms: int,
    out: Tensor,
) -> None:
    _check_buffer("buffer", buffer)
    _check_state("state", state, "buffer", buffer)
    checks.check_not_negative("stride", stride)
    _check_copies(copies, max_rows, max_columns, vector, "buffer", buffer)
    if num_terms < 1:
        raise ValueError(f"num_terms must be 1 or more, got {num_terms}")
    _check_out(out, "buffer", buffer)


def check_copy_rectangles(
    source: Tensor, copies: Tensor, max_rows: int, max_columns: int, vector: int, out: Tensor
) -> None:
    _check_source(source)
    _check_copies(copies, max_rows, max_columns, vector, "source", source)
    _check_out(out, "source", source)


def _check_out(out: Tensor, name: str, like: Tensor) -> None:
    checks.check_float("out", out)
    checks.check_contiguous("out", out)
    checks.check_same_device(name, like, out=out)


def check_push_mean(
    parts: Tensor,
    parts_state: Tensor,
    means: list[Tensor],
    addresses: Tensor,
    means_state: Tensor,
    share: int,
    num_elements: int,
    rank: int,
) -> None:
    _check_buffer("parts", parts)
    _check_state("parts_state", parts_state, "parts", parts)
    _check_addresses(addresses, "means", means, "parts", parts)
    checks.check_operand("means[0]", means[0], parts.shape, "that of parts", "parts", parts)
    _check_state("means_state", means_state, "parts", parts)
    num_ranks, half = len(means), parts.shape[1]
    checks.check_rank("rank", rank, num_ranks)
    checks.check_not_negative("share", share)
    if num_elements > min(share, half - (num_ranks - 1) * share):
        raise ValueError(
            f"num_elements must be at most share, {share}, and share must fit {num_ranks} times "
            f"into a half of {half} elements, got {num_elements}"
        )


def check_push_barrier(
    flags: list[Tensor],
    addresses: Tensor,
    state: Tensor,
    failed: Tensor,
    rank: int,
    limit_seconds: float,
) -> None:
    checks.check_rank("rank", rank, len(flags))
    own = flags[rank]
    name = f"flags[{rank}]"
    checks.check_dtype(name, own, (torch.int32,), "call .int()")
    checks.check_memory(name, own, (len(flags),), "one for each rank", name, own)
    _check_addresses(addresses, "flags", flags, name, own)
    _check_state("state", state, name, own)
    # Kernels write it in pinned memory of the host, so it may be on another device.
    checks.check_dtype("failed", failed, (torch.int32,), "call .int()")
    checks.check_numel("failed", failed, 1, "1 + the first rank that is late")
    if not limit_seconds >= 0:
        raise ValueError(f"limit_seconds must not be negative, got {limit_seconds}")


def check_push_pooled_lookup(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    copies: Tensor,
    max_rows: int,
    max_columns: int,
    vector: int,
    buffers: list[Tensor],
    addresses: Tensor,
    state: Tensor,
) -> None:
    _check_exchange(buffers, addresses, state, "weight", weight)
    bags = offsets, hotness, per_id_weights, num_features, batch_size
    check_pooled_lookup_forward(weight, rows, *bags, mean=False, output_dtype=buffers[0].dtype)
    _check_copies(copies, max_rows, max_columns, vector, "weight", weight)
    if copies.shape[0] != num_features * len(buffers):
        raise ValueError(
            f"copies must hold {num_features * len(buffers)} copies (one for each feature and "
            f"rank), got {copies.shape[0]}"
        )
