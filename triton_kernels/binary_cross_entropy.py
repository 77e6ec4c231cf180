"""Triton kernels of the ``binary_cross_entropy_*`` operations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchembed.triton_kernels.rounding import as_float32, round_to_nearest
from torchembed.triton_kernels.row_blocks import index_type

_BLOCK = 1024
_SUM_BLOCK = 8192
"""Logits whose losses one program sums. A constant, so that the order of the sum follows from the
number of logits alone."""


@triton.jit
def _exp_of_minus(x):
    """``exp(-x)`` for x of 0 or more, as ``2**-n * exp(-r)`` with ``x = n log(2) + r``: the GPU's
    own is less exact the larger x is (W. Cody, W. Waite, 1980; the parts of log(2) are theirs)."""
    # exp(-200) is 0 in float32; an infinite x would make r a NaN.
    x = tl.where(x > 200.0, 200.0, x)
    n = tl.floor(x * 1.44269504 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.42860682030941723e-6
    return tl.exp2(-n) * tl.exp(-r)


@triton.jit
def _log_of_one_plus(x):
    """``log(1 + x)`` for x in [0, 1], by its series in ``s = x / (2 + x)``, which is 1/3 at most:
    ``2 (s + s**3 / 3 + s**5 / 5 + ...)``; rounding ``1 + x`` would lose a small x."""
    s = tl.div_rn(x, 2.0 + x)
    square = s * s
    series = square * (1.0 / 17) + 1.0 / 15
    series = square * series + 1.0 / 13
    series = square * series + 1.0 / 11
    series = square * series + 1.0 / 9
    series = square * series + 1.0 / 7
    series = square * series + 1.0 / 5
    series = square * series + 1.0 / 3
    return 2.0 * (s + s * (square * series))


@triton.jit
def _binary_cross_entropy_forward_kernel(
    logits_ptr,
    labels_ptr,
    sums_ptr,
    num_logits,
    divisor,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the losses of this program's logits, over ``divisor``.

    Logits 0 and 0 with labels 0 and 1 have the losses log(2) and log(2).
    """
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_logits
    z = as_float32(tl.load(logits_ptr + at, mask=mask, other=0.0))
    y = as_float32(tl.load(labels_ptr + at, mask=mask, other=0.0))
    # tl.maximum may drop a NaN; this comparison keeps it, so that the loss shows it.
    larger = tl.where(z < 0, 0.0, z)
    loss = larger - z * y + _log_of_one_plus(_exp_of_minus(tl.abs(z)))
    total = tl.sum(tl.where(mask, loss, 0.0), axis=0)
    tl.store(sums_ptr + tl.program_id(0), total / divisor)


@triton.jit
def _binary_cross_entropy_backward_kernel(
    grad_ptr,
    logits_ptr,
    labels_ptr,
    out_ptr,
    num_logits,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out = (sigmoid(z) - y) * grad / num_logits``: ``(1/2 - 0) * 1 / 2 = 1/4`` for z = 0, y = 0,
    one of two logits."""
    at = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_logits
    z = as_float32(tl.load(logits_ptr + at, mask=mask, other=0.0))
    y = as_float32(tl.load(labels_ptr + at, mask=mask, other=0.0))
    # Of exp(z) and exp(-z) the one that is at most 1, so that nothing overflows.
    small = _exp_of_minus(tl.abs(z))
    sigmoid = tl.where(z < 0, small, 1.0) / (1.0 + small)
    slope = (sigmoid - y) * (tl.load(grad_ptr) / num_logits)
    tl.store(out_ptr + at, round_to_nearest(slope, out_ptr.dtype.element_ty), mask=mask)


def launch_binary_cross_entropy_forward(logits: Tensor, labels: Tensor) -> Tensor:
    """``torchembed::binary_cross_entropy_forward``; see
    :func:`torchembed.ops.binary_cross_entropy.binary_cross_entropy`."""
    num_logits = logits.numel()
    if num_logits == 0:
        return torch.full((), torch.nan, device=logits.device)
    num_programs = triton.cdiv(num_logits, _SUM_BLOCK)
    sums = torch.empty(num_programs, device=logits.device, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _binary_cross_entropy_forward_kernel[(num_programs,)](
            logits,
            labels,
            sums,
            num_logits,
            float(num_logits),
            INDEX=index_type(logits),
            BLOCK=_SUM_BLOCK,
            num_warps=32,
        )
    return sums.view(()) if num_programs == 1 else sums.sum()


def launch_binary_cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """``torchembed::binary_cross_entropy_backward``."""
    out = torch.empty_like(logits)
    if out.numel():
        with torch.cuda.device_of(logits):
            _binary_cross_entropy_backward_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
                grad,
                logits,
                labels,
                out,
                out.numel(),
                INDEX=index_type(logits),
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return out
