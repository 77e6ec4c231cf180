"""The specification of exchanges by push in eager torch.

A **channel** is a double buffer on every rank, ``buffers[rank]`` ``[2, elements]``, in the dtype
that is sent. Exchange number ``epoch`` (1, 2, ...) uses half ``epoch % 2``. ``state`` int32 ``[2]``
of a rank is the number of exchanges that are over, which wraps around, and 1 once a rank has timed
out. Kernels reach the buffers by ``addresses``; here the tensors are written.

``max_rows``, ``max_columns`` and ``vector`` bound the numbers of the copies, for a kernel's grid.
"""

import time

import torch
from torch import Tensor

from torchembed.ops.pooled_lookup.reference import pooled_lookup_forward_reference


def push_rectangles_reference(
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
    half = _coming_half(state)
    if scale is not None:
        source = source * scale
    for rank, *rectangle in copies.tolist():
        _copy_rectangle(source, rectangle, buffers[rank][half])


def collect_rectangles_reference(
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
    arrived = buffer[_half(state)]
    for _, num_rows, num_columns, row, column, *place in copies.tolist():
        first = arrived[row * stride + column :]
        terms = first.as_strided((num_terms, num_rows, num_columns), (num_columns, stride, 1))
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term
        _copy_rectangle(total, [num_rows, num_columns, 0, 0, *place], out)


def copy_rectangles_reference(
    source: Tensor, copies: Tensor, max_rows: int, max_columns: int, vector: int, out: Tensor
) -> None:
    for _, *rectangle in copies.tolist():
        _copy_rectangle(source, rectangle, out)


def push_mean_reference(
    parts: Tensor,
    parts_state: Tensor,
    means: list[Tensor],
    addresses: Tensor,
    means_state: Tensor,
    share: int,
    num_elements: int,
    rank: int,
) -> None:
    arrived = parts[_half(parts_state)]
    total = torch.zeros(max(num_elements, 0), device=parts.device)
    for peer in range(len(means)):
        total += arrived[peer * share : peer * share + total.numel()]
    mean = total / len(means)
    half = _coming_half(means_state)
    for buffer in means:
        buffer[half][rank * share : rank * share + total.numel()] = mean.to(buffer.dtype)


def push_barrier_reference(
    flags: list[Tensor],
    addresses: Tensor,
    state: Tensor,
    failed: Tensor,
    rank: int,
    limit_seconds: float,
) -> None:
    epoch = state[0] + 1
    for of_peer in flags:
        of_peer[rank] = epoch
    deadline = time.monotonic() + (0 if state[1] else limit_seconds)
    # Differences, since epochs wrap around.
    is_late = flags[rank] - epoch < 0
    while is_late.any() and time.monotonic() < deadline:
        is_late = flags[rank] - epoch < 0
    if is_late.any():
        failed.fill_(1 + int(is_late.nonzero()[0]))
        state[1] = 1
    state[0] = epoch


def push_pooled_lookup_reference(
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
    pooled = pooled_lookup_forward_reference(
        *(weight, rows, offsets, hotness, per_id_weights, num_features, batch_size),
        mean=False,
        output_dtype=buffers[0].dtype,
    )
    half = _coming_half(state)
    by_feature = copies.view(num_features, len(buffers), copies.shape[1]).tolist()
    for feature, of_feature in enumerate(by_feature):
        for rank, num_rows, num_columns, row, _, *place in of_feature:
            rectangle = [num_rows, num_columns, row, 0, *place]
            _copy_rectangle(pooled[:, feature], rectangle, buffers[rank][half])


def _half(state: Tensor) -> int:
    """The half of the exchange that is over."""
    return int(state[0]) % 2


def _coming_half(state: Tensor) -> int:
    """The half of the exchange that is under way."""
    return 1 - _half(state)


def _copy_rectangle(source: Tensor, rectangle: list[int], out: Tensor) -> None:
    """Copy ``rectangle``, the fields of a copy after its rank, to the contiguous ``out``, in its
    dtype."""
    num_rows, num_columns, row, column, target, stride = rectangle
    if num_rows and num_columns:
        place = out.view(-1)[target:].as_strided((num_rows, num_columns), (stride, 1))
        place.copy_(source[row : row + num_rows, column : column + num_columns])
