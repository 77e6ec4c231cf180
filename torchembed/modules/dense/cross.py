"""The cross networks: ``LowRankCross`` and ``Cross`` of DCN-V2, and ``VectorCross`` of DCN."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchembed.ops.cross import full_rank_cross, low_rank_cross_network


def _check_num_layers(num_layers: int) -> None:
    if num_layers < 0:
        raise ValueError(f"num_layers must not be negative, got {num_layers}")


class LowRankCross(nn.Module):
    """A stack of low-rank cross layers.

    ``x[l + 1] = x[0] * (u[l] @ v[l] @ x[l] + bias[l]) + x[l]`` for layer l and each sample x, by
    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021. Maps ``[B, in_features]`` to
    the same shape. Each layer's arithmetic after its matrix products is one fused pass. Initial
    values are Glorot's normal ones, and biases of zero.

    Args:
        in_features: width ``N`` of input and output.
        num_layers: layers of the stack.
        low_rank: inner width ``r`` of each layer, ``u [N, r] @ v [r, N]``.
        device: where to make the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: for a ``low_rank`` below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        low_rank: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_num_layers(num_layers)
        if low_rank < 1:
            raise ValueError(f"low_rank must be 1 or more, got {low_rank}")

        def parameters(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(
                torch.empty(shape, device=device, dtype=dtype) for _ in range(num_layers)
            )

        self.v = parameters(low_rank, in_features)
        self.u = parameters(in_features, low_rank)
        self.bias = parameters(in_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        for v, u, bias in zip(self.v, self.u, self.bias, strict=True):
            nn.init.xavier_normal_(v)
            nn.init.xavier_normal_(u)
            nn.init.zeros_(bias)

    def forward(self, *x0: Tensor) -> Tensor:
        """``x0`` is ``[B, in_features]``, or several tensors that are it side by side."""
        return low_rank_cross_network(x0, list(self.v), list(self.u), list(self.bias))


class _CrossStack(nn.Module):
    """The parameters of cross layers that have one weight each."""

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        rows: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """
        Args:
            rows: of each layer's weight, ``[rows, in_features]``.
            others: as for the derived classes.
        """
        super().__init__()
        _check_num_layers(num_layers)

        def parameters(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(
                torch.empty(shape, device=device, dtype=dtype) for _ in range(num_layers)
            )

        self.weight = parameters(rows, in_features)
        self.bias = parameters(in_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        for weight, bias in zip(self.weight, self.bias, strict=True):
            nn.init.xavier_normal_(weight)
            nn.init.zeros_(bias)


class Cross(_CrossStack):
    """A stack of full-rank cross layers.

    ``x[l + 1] = x[0] * (weight[l] @ x[l] + bias[l]) + x[l]`` for layer l and each sample x, by
    R. Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021. Maps ``[B, in_features]`` to
    the same shape. Each layer's arithmetic after its matrix product is one fused pass. Initial
    values are Glorot's normal ones, and biases of zero.

    Args:
        in_features: width ``N`` of input and output; each layer's weight is ``[N, N]``.
        num_layers: layers of the stack.
        device: where to make the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_layers, rows=in_features, device=device, dtype=dtype)

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = full_rank_cross(x0, x, weight, bias)
        return x


class VectorCross(_CrossStack):
    """A stack of cross layers with a vector each.

    ``x[l + 1] = x[0] * (weight[l] . x[l]) + bias[l] + x[l]`` for layer l and each sample x, by
    R. Wang et al., "Deep & Cross Network for Ad Click Predictions", ADKDD 2017. Maps
    ``[B, in_features]`` to the same shape. Initial values are Glorot's normal ones, and biases of
    zero.

    Args:
        in_features: width ``N`` of input and output; each layer's weight is ``[1, N]``.
        num_layers: layers of the stack.
        device: where to make the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_layers, rows=1, device=device, dtype=dtype)

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = x0 * functional.linear(x, weight) + bias + x
        return x
