"""``CompressedInteraction``: the interaction of features in xDeepFM."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class CompressedInteraction(nn.Module):
    """A compressed interaction network: products of vectors of higher and higher degree, by column.

    With ``x[0]`` the vectors of the features, layer k has ``x[k]_h = sum_ij weight[k]_hij * (x[k -
    1]_i * x[0]_j)``, and its sums over columns are a part of the output: equations 6 and 8 of J.
    Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender
    Systems", KDD 2018, which takes no activation between layers. A layer is one matrix product for
    all samples and columns. Initial values are Glorot's normal ones.

    Args:
        num_features: number ``F`` of vectors.
        layer_sizes: number of vectors of each layer.
        device: where to make the parameters.

    Raises:
        ValueError: for no layers.
    """

    def __init__(
        self,
        num_features: int,
        layer_sizes: Sequence[int],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not layer_sizes:
            raise ValueError("layer_sizes must hold one number or more, got none")
        before = [num_features, *layer_sizes[:-1]]
        self.layers = nn.ModuleList(
            nn.Linear(num * num_features, size, bias=False, device=device)
            for num, size in zip(before, layer_sizes, strict=True)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        for parameter in self.parameters():
            nn.init.xavier_normal_(parameter)

    def forward(self, vectors: Tensor) -> Tensor:
        """The sums of all layers' vectors.

        Args:
            vectors: ``[B, F, D]``.

        Returns:
            ``[B, sum(layer_sizes)]``.
        """
        first = vectors.transpose(1, 2)  # [B, D, F]: columns are as samples
        x, sums = first, []
        for layer in self.layers:
            x = layer((x.unsqueeze(3) * first.unsqueeze(2)).flatten(2))
            sums.append(x.sum(dim=1))
        return torch.cat(sums, dim=1)
