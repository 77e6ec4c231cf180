"""``MLP``: a stack of linear layers."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from torchembed.core.checks import FLOAT_DTYPES
from torchembed.ops.linear import linear, linear_relu_stack


class _Linear(nn.Linear):
    """A linear layer whose initial values are those of Facebook's DLRM.

    Weights are normal with variance ``2 / (in_features + out_features)``, biases with variance
    ``1 / out_features`` (M. Naumov et al., "Deep Learning Recommendation Model for Personalization
    and Recommendation Systems", arXiv:1906.00091, and its published program).
    """

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)
        if self.bias is not None:
            nn.init.normal_(self.bias, std=math.sqrt(1 / self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype in FLOAT_DTYPES:
            return linear(x, self.weight, self.bias)
        return super().forward(x)


class _BatchNorm(nn.BatchNorm1d):
    """Batch normalization that also takes batches of one sample or none, as last batches may be.

    Such a batch has no variance: it is normalized by the running statistics, which stay unchanged.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.shape[0] < 2:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(x)


def _has_hooks(layer: nn.Module) -> bool:
    """True if ``layer``, or all modules, have hooks, which a fused operation would not call."""
    return bool(
        _has_any_global_hook()
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def _are_fusible(layer: nn.Module, following: nn.Module) -> TypeGuard[_Linear]:
    """True if ``linear_relu_stack`` can compute ``layer`` and the rectifier ``following`` it."""
    return (
        isinstance(layer, _Linear)
        and layer.bias is not None
        and layer.weight.dtype in FLOAT_DTYPES
        and type(following) is nn.ReLU
        and not _has_hooks(layer)
        and not _has_hooks(following)
    )


def _share(layer: _Linear, other: _Linear) -> bool:
    """True if both layers have a parameter in common."""
    return layer.weight is other.weight or layer.bias is other.bias


def _fusible_run(layers: Sequence[nn.Module]) -> list[_Linear]:
    """The linear layers at the start of ``layers`` that one ``linear_relu_stack`` computes, with
    the rectifier after each."""
    run: list[_Linear] = []
    for layer, following in zip(layers[::2], layers[1::2], strict=False):
        # torch.compile takes no tensor twice.
        if not _are_fusible(layer, following) or any(_share(layer, other) for other in run):
            break
        run.append(layer)
    return run


class MLP(nn.Sequential):
    """A stack of linear layers, each followed by batch normalization, activation and dropout.

    Maps ``[B, in_features]`` to ``[B, layer_sizes[-1]]``. Initial values are those of DLRM: normal
    weights with variance ``2 / (in + out)`` and normal biases with variance ``1 / out``.

    Consecutive linear layers with a rectifier right after each are one operation, unless one of
    them has hooks. Gradients of weights may be deferred, see
    :class:`~torchembed.autograd.weight_gradients.DeferredWeightGradients`.

    Args:
        in_features: width of the input.
        layer_sizes: width of each layer's output, one or more.
        activation: makes the activation of a layer; called once for each.
        dropout: probability that an activation becomes zero in training.
        batch_norm: normalize each layer over the batch, before its activation.
        bias: give the linear layers a bias.
        activation_on_last: False leaves the last layer linear, without dropout or normalization,
            as for logits.
        device: where to make the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: for no layers, or a width below 1.
    """

    layer_type: ClassVar[type[nn.Linear]] = _Linear
    """Class of the linear layers."""

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.0,
        batch_norm: bool = False,
        bias: bool = True,
        activation_on_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not layer_sizes:
            raise ValueError("layer_sizes must hold one width or more, got none")
        if in_features < 1 or min(layer_sizes) < 1:
            raise ValueError(
                "in_features and layer_sizes must be at least 1, got "
                f"{in_features} and {list(layer_sizes)}"
            )
        layers: list[nn.Module] = []
        width = in_features
        for index, size in enumerate(layer_sizes):
            layers.append(_Linear(width, size, bias=bias, device=device, dtype=dtype))
            width = size
            if index == len(layer_sizes) - 1 and not activation_on_last:
                break
            if batch_norm:
                layers.append(_BatchNorm(size, device=device, dtype=dtype))
            layers.append(activation())
            if dropout:
                layers.append(nn.Dropout(dropout))
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        layers: list[nn.Module] = [*self]
        while layers:
            run = _fusible_run(layers)
            if run:
                # One operation for the run, so that no layer's output is written and read again.
                weights, biases = [layer.weight for layer in run], [layer.bias for layer in run]
                x = linear_relu_stack(x, weights, biases)
                del layers[: 2 * len(run)]
            else:
                x = layers.pop(0)(x)
        return x
