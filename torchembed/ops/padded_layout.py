"""``PaddedLayout``: rows of bags in a dense tensor and back, a lookup each way."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.core.function_context import FunctionContext
from torchembed.core.padded_dense import rows_or_zeros
from torchembed.ops.bags_without_search import bags_of_ids
from torchembed.ops.sequence_lookup.schema import sequence_lookup_forward_op


class PaddedLayout(NamedTuple):
    """Places of the rows of bags in a dense tensor ``[B, length, ...]``, both ways.

    For what is padded and packed several times by one layout, of float32, float16 or bfloat16 by
    the kernels of lookups. Backward looks up too, so that nothing is added in any order.
    """

    rows: Tensor
    """int64 ``[B, length]``: the row in each place; -1 in a place without one."""
    places: Tensor
    """int64 ``[L]``: the place of each row, counted through all bags; -1 for a row that is cut off
    or behind the last bag."""

    @classmethod
    def of(cls, offsets: Tensor, length: int, num_rows: int) -> "PaddedLayout":
        """The layout of the first ``length`` rows of each bag; waits for no GPU.

        Args:
            offsets: ``[B + 1]``, where bags begin and end.
            length: places of each bag.
            num_rows: rows ``L``, with those behind the last bag.
        """
        device = offsets.device
        starts, lengths = offsets[:-1].unsqueeze(1), offsets.diff().unsqueeze(1)
        within = torch.arange(length, device=device)
        rows = (starts + within).where(within < lengths, -1)
        positions = torch.arange(num_rows, device=device)
        if torch.compiler._is_exporting_flag:
            # ONNX has no search.
            bags = bags_of_ids(offsets.diff(), num_rows)
        else:
            bags = torch.searchsorted(offsets[1:].contiguous().long(), positions, right=True)
        within_bag = positions - offsets[bags.clamp_max(offsets.shape[0] - 1)]
        is_there = (bags < offsets.shape[0] - 1) & (within_bag < length)
        return cls(rows, (bags * length + within_bag).where(is_there, -1))

    def pad(self, values: Tensor) -> Tensor:
        """``values [L, ...]`` as ``[B, length, ...]``, zeros in places without a row."""
        found = _looked_up(values, self.rows.flatten(), self.places)
        return found.unflatten(0, self.rows.shape)

    def pack(self, dense: Tensor) -> Tensor:
        """``dense [B, length, ...]`` as ``[L, ...]``, zeros for rows without a place."""
        return _looked_up(dense.flatten(0, 1), self.places, self.rows.flatten())


def _looked_up(source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """:class:`_LookedUp`, in operations that other runtimes have where a program is exported."""
    if torch.compiler._is_exporting_flag:
        return rows_or_zeros(source, index)
    return _LookedUp.apply(source, index, inverse)


class _LookedUp(torch.autograd.Function):
    """``source[index]``, zeros for an index of -1; ``inverse`` says which element of the result
    each row of the source became, -1 for none, so that the gradient is looked up likewise."""

    @staticmethod
    def forward(ctx: FunctionContext, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        if source.dtype in FLOAT_DTYPES and source.dim() > 1:
            flat = source.flatten(1).contiguous()
            found = sequence_lookup_forward_op(flat, index, source.dtype)
            return found.view(index.shape[0], *source.shape[1:])
        if not source.shape[0]:
            return source.new_zeros(index.shape[0], *source.shape[1:])
        found = source.index_select(0, index.clamp_min(0))
        return found.masked_fill((index < 0).view(-1, *[1] * (source.dim() - 1)), 0)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        return _LookedUp.apply(grad, inverse, index), None, None
