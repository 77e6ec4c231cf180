"""The specification of the ``binary_cross_entropy_*`` operations in eager torch."""

import torch
from torch import Tensor


def binary_cross_entropy_forward_reference(logits: Tensor, labels: Tensor) -> Tensor:
    z = logits.float()
    return (z.clamp_min(0) - z * labels.float() + torch.log1p(torch.exp(-z.abs()))).mean()


def binary_cross_entropy_backward_reference(grad: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    slope = torch.sigmoid(logits.float()) - labels.float()
    return (slope * (grad.float() / max(logits.numel(), 1))).to(logits.dtype)
