"""Layers of TorchRec models by our operations, over the layers' own parameters."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import LowRankCrossNet

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.ops.cross import low_rank_cross_network
from torchembed.ops.linear import linear


def fused_forwards(model: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Layers of ``model`` whose forward may be another, and which: the same formula in fewer
    passes, whose gradients of weights may come after those of inputs. Of exactly these types."""
    forwards: dict[type, Any] = {nn.Linear: _linear, LowRankCrossNet: _low_rank_cross}
    return [
        (module, functools.partial(forwards[type(module)], module))
        for module in model.modules()
        if type(module) in forwards
    ]


# ``input`` is what torch and TorchRec call it, and what callers may.


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
    if not _is_ours(input, layer.weight):
        return nn.Linear.forward(layer, input)
    return linear(input, layer.weight, layer.bias)


def _low_rank_cross(layer: LowRankCrossNet, input: Tensor) -> Tensor:  # noqa: A002
    v, u = list(layer.V_kernels), list(layer.W_kernels)
    if input.dim() != 2 or not v or not _is_ours(input, v[0]):
        return LowRankCrossNet.forward(layer, input)
    return low_rank_cross_network(input, v, u, list(layer.bias))


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether our operations take them; what they refuse, torch's say better why."""
    if weight.dtype not in FLOAT_DTYPES or x.shape[-1:] != weight.shape[1:]:
        return False
    return torch.is_autocast_enabled(x.device.type) or x.dtype is weight.dtype
