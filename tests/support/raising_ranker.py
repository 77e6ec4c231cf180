"""A model that raises for some batches, and such batches."""

import dataclasses
import enum

import torch
from torch import Tensor

from tests.support.disk_tables import NUM_IDS, StoredRanker
from torchembed import SparseFeatures
from torchembed.data import Batch


class Mark(enum.IntEnum):
    """Why a batch cannot be trained: the first number of one that raises in the model."""

    BAD_ID = 90
    BEFORE_LOOKUP = 91
    AFTER_LOOKUP = 92
    IN_BACKWARD = 93


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", logits: Tensor, mark: Tensor) -> Tensor:
        ctx.save_for_backward(mark)
        return logits.clone()

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *grads: Tensor) -> tuple[Tensor, None]:
        (mark,) = ctx.saved_tensors  # type: ignore[attr-defined]
        torch.ops.aten._assert_async(mark != Mark.IN_BACKWARD)
        return grads[0], None


class RaisingRanker(StoredRanker):
    """Raises where the first number of a batch says so."""

    def forward(self, dense: Tensor, sparse: SparseFeatures) -> Tensor:
        mark = dense[0, 0]
        torch.ops.aten._assert_async(mark != Mark.BEFORE_LOOKUP)
        logits = super().forward(dense, sparse)
        torch.ops.aten._assert_async(mark != Mark.AFTER_LOOKUP)
        return _RaisesInBackward.apply(logits, mark)


def marked(one: Batch, mark: Mark) -> Batch:
    """``one`` as a batch that cannot be trained."""
    if mark is Mark.BAD_ID:
        values = one.sparse.values.clone()
        values[len(values) // 2] = NUM_IDS
        return one._replace(sparse=dataclasses.replace(one.sparse, values=values))
    assert one.dense is not None
    dense = one.dense.clone()
    dense[0, 0] = mark
    return one._replace(dense=dense)
