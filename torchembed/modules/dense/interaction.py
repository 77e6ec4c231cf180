"""``DotInteraction``: the interaction of features in DLRM."""

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """Concatenates the dense vector with the dot products of all pairs of it and the sparse
    vectors.

    With the dense vector first, the pairs ``(i, j)``, ``i < j``, come in lexicographic order: (0,
    1), (0, 2) and so on, as in TorchRec. Facebook's own DLRM has the same products in another
    order, by j first.
    """

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """The interactions of each sample.

        Args:
            dense: ``[B, D]``.
            sparse: ``[B, F, D]``.

        Returns:
            ``[B, D + F * (F + 1) / 2]``.

        Raises:
            ValueError: for shapes that do not fit.
        """
        if sparse.dim() != 3 or dense.shape != (sparse.shape[0], sparse.shape[2]):
            raise ValueError(
                "dense must be [B, D] and sparse [B, F, D], "
                f"got shapes {tuple(dense.shape)} and {tuple(sparse.shape)}"
            )
        vectors = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        count = vectors.shape[1]
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        first, second = torch.triu_indices(count, count, offset=1, device=vectors.device)
        return torch.cat([dense, products.index_select(1, first * count + second)], dim=1)
