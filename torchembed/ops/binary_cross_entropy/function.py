"""The public function ``binary_cross_entropy``."""

import torch
from torch import Tensor

from torchembed.autograd.first_order import first_order
from torchembed.core.function_context import FunctionContext
from torchembed.ops.binary_cross_entropy.schema import (
    binary_cross_entropy_backward_op,
    binary_cross_entropy_forward_op,
)


class _BinaryCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return binary_cross_entropy_forward_op(logits, labels)

    @staticmethod
    @first_order(
        "torchembed's binary_cross_entropy", "torch.nn.functional.binary_cross_entropy_with_logits"
    )
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, None]:
        return binary_cross_entropy_backward_op(grad, *ctx.saved_tensors), None


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of ``max(z, 0) - z * y + log(1 + exp(-|z|))`` over logits z with labels y.

    That is ``torch.nn.functional.binary_cross_entropy_with_logits``, whose place it can take: it
    neither overflows nor cancels for any z. Arithmetic is float32, and the order of the sum follows
    from the number of logits: deterministic. Never synchronizes. Labels get no gradient.

    The Triton kernels read each logit and each label once forward, and write a float32 sum for each
    8192 logits, which are added up where there are several; backward reads both once more and
    writes each gradient once. Nothing else as large as the logits is read or written.

    Worked example: logits 0 and 0 with labels 0 and 1 give ``log(2)``, and gradients 1/4 and -1/4.

    Args:
        logits: float32, float16 or bfloat16, of any shape.
        labels: of that shape and one of those types, each from 0 to 1.

    Returns:
        ``[]``, float32; NaN for no logits.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return _BinaryCrossEntropy.apply(logits.contiguous(), labels.detach().contiguous())
