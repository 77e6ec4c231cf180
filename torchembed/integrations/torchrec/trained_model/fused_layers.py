"""Forwards of TorchRec's dense layers by torchembed's fused operations, on the same parameters."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import LowRankCrossNet

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.ops.cross import low_rank_cross_network
from torchembed.ops.linear import linear


def fused_forwards(model: nn.Module) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Pairs of a layer of ``model`` and a function that computes its forward in fewer passes.

    The formula is the layer's own; gradients of weights may be computed after those of inputs.
    Subclasses of the known layers, which may compute something else, are left out.
    """
    forwards: dict[type, Callable[[Any, Tensor], Tensor]] = {
        nn.Linear: _linear,
        LowRankCrossNet: _low_rank_cross,
    }
    return [
        (module, functools.partial(forwards[type(module)], module))
        for module in model.modules()
        if type(module) in forwards
    ]


# The parameter is ``input``, since callers may pass it by the name that torch and TorchRec use.


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
    if not _is_supported(input, layer.weight):
        return nn.Linear.forward(layer, input)
    return linear(input, layer.weight, layer.bias)


def _low_rank_cross(layer: LowRankCrossNet, input: Tensor) -> Tensor:  # noqa: A002
    v, u = list(layer.V_kernels), list(layer.W_kernels)
    if input.dim() != 2 or not v or not _is_supported(input, v[0]):
        return LowRankCrossNet.forward(layer, input)
    return low_rank_cross_network(input, v, u, list(layer.bias))


def _is_supported(x: Tensor, weight: Tensor) -> bool:
    """True where torchembed's operations take both; for what they refuse, torch's own forward runs
    and raises the error that its users know."""
    if weight.dtype not in FLOAT_DTYPES or x.shape[-1:] != weight.shape[1:]:
        return False
    return torch.is_autocast_enabled(x.device.type) or x.dtype is weight.dtype
