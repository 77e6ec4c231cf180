"""The dense part of DLRM-DCNv2, from torchembed's modules and from plain PyTorch's."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.data.dlrm_dcnv2 import (
    DENSE_ARCH,
    LOW_RANK,
    NUM_CROSS_LAYERS,
    NUM_DENSE,
    OVER_ARCH,
    WIDTH,
)
from torchembed.modules import MLP, LowRankCross
from torchembed.ops.binary_cross_entropy import binary_cross_entropy


class PlainCross(nn.Module):
    """The cross network by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.ParameterList(torch.empty(LOW_RANK, WIDTH) for _ in range(NUM_CROSS_LAYERS))
        self.u = nn.ParameterList(torch.empty(WIDTH, LOW_RANK) for _ in range(NUM_CROSS_LAYERS))
        self.bias = nn.ParameterList(torch.empty(WIDTH) for _ in range(NUM_CROSS_LAYERS))

    def forward(self, *parts: Tensor) -> Tensor:
        x0 = x = torch.cat(parts, dim=1)
        for v, u, bias in zip(self.v, self.u, self.bias, strict=True):
            x = x0 * F.linear(F.linear(x, v), u, bias) + x
        return x


def plain_mlp(width: int, sizes: Sequence[int], *, activation_on_last: bool) -> nn.Sequential:
    """``nn.Linear`` and ``nn.ReLU``, with the names of our :class:`MLP`."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*(layers if activation_on_last else layers[:-1]))


class DensePart(nn.Module):
    """Dense features and pooled embeddings to the loss."""

    def __init__(
        self,
        bottom: nn.Module,
        cross: nn.Module,
        top: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.bottom, self.cross, self.top, self.loss = bottom, cross, top, loss

    def forward(self, dense: Tensor, pooled: Tensor, labels: Tensor) -> Tensor:
        crossed = self.cross(self.bottom(dense), pooled)
        return self.loss(self.top(crossed).squeeze(1), labels)


def ours() -> DensePart:
    """The dense part from torchembed's modules."""
    return DensePart(
        MLP(NUM_DENSE, DENSE_ARCH),
        LowRankCross(WIDTH, NUM_CROSS_LAYERS, LOW_RANK),
        MLP(WIDTH, OVER_ARCH, activation_on_last=False),
        binary_cross_entropy,
    )


def plain() -> DensePart:
    """The dense part from torch's modules."""
    return DensePart(
        plain_mlp(NUM_DENSE, DENSE_ARCH, activation_on_last=True),
        PlainCross(),
        plain_mlp(WIDTH, OVER_ARCH, activation_on_last=False),
        F.binary_cross_entropy_with_logits,
    )
