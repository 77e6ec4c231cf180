"""Experts, and the gates that mix their outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchembed.modules.dense.mlp import MLP


class Experts(nn.ModuleList):
    """Networks of one form over one input; maps ``[B, in_features]`` to ``[B, E, D]``.

    Args:
        in_features: width of the input.
        num_experts: number ``E`` of them, one or more.
        layer_sizes: widths of the layers of each, the last of them ``D``.
        dropout: dropout rate of the layers.
        device: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        layer_sizes: Sequence[int],
        *,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            MLP(in_features, layer_sizes, dropout=dropout, device=device)
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self], dim=1)


class Gate(nn.Module):
    """Means of experts' outputs, weighted by a softmax of a linear function of the input.

    ``mixed = sum_e softmax(x @ weight.T)_e * experts_e``, without a bias (equations 6 and 7 of
    J. Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", KDD 2018).

    Args:
        in_features: width of the input.
        num_experts: number ``E`` of the experts.
        device: of the parameters.
    """

    def __init__(
        self, in_features: int, num_experts: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.scores = nn.Linear(in_features, num_experts, bias=False, device=device)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Mix the outputs of experts.

        Args:
            x: ``[B, in_features]``.
            experts: ``[B, E, D]``.

        Returns:
            ``[B, D]``.
        """
        return (self.scores(x).softmax(dim=1).unsqueeze(2) * experts).sum(dim=1)
