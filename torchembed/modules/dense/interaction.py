"""Products of pairs of features: ``DotInteraction`` of DLRM, and ``sum_of_pair_products`` of
factorization machines."""

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """Concatenates the dense vector with the dot products of all pairs of it and the sparse
    vectors; without a dense vector the dot products of the sparse ones alone.

    With the dense vector first, the pairs ``(i, j)``, ``i < j``, come in lexicographic order: (0,
    1), (0, 2) and so on, as in TorchRec. Facebook's own DLRM has the same products in another
    order, by j first.
    """

    def forward(self, dense: Tensor | None, sparse: Tensor) -> Tensor:
        """The interactions of each sample.

        Args:
            dense: ``[B, D]``, or None.
            sparse: ``[B, F, D]``.

        Returns:
            ``[B, D + F * (F + 1) / 2]``; without ``dense`` ``[B, F * (F - 1) / 2]``.

        Raises:
            ValueError: for shapes that do not fit.
        """
        if dense is None:
            return _products_of_pairs(sparse)
        if sparse.dim() != 3 or dense.shape != (sparse.shape[0], sparse.shape[2]):
            raise ValueError(
                "dense must be [B, D] and sparse [B, F, D], "
                f"got shapes {tuple(dense.shape)} and {tuple(sparse.shape)}"
            )
        vectors = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        return torch.cat([dense, _products_of_pairs(vectors)], dim=1)


def _products_of_pairs(vectors: Tensor) -> Tensor:
    """The dot products of all pairs of ``vectors [B, F, D]``, ``[B, F * (F - 1) / 2]``."""
    count = vectors.shape[1]
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    first, second = torch.triu_indices(count, count, offset=1, device=vectors.device)
    return products.index_select(1, first * count + second)


def sum_of_pair_products(vectors: Tensor) -> Tensor:
    """The sum of the dot products of all pairs of vectors, in one pass over them.

    ``sum_{i < j} v_i . v_j = (|sum_i v_i|^2 - sum_i |v_i|^2) / 2``, lemma 3.1 of S. Rendle,
    "Factorization Machines", ICDM 2010.

    Args:
        vectors: ``[B, F, D]``.

    Returns:
        ``[B, 1]``.
    """
    square_of_sum = vectors.sum(dim=1).square()
    sum_of_squares = vectors.square().sum(dim=1)
    return 0.5 * (square_of_sum - sum_of_squares).sum(dim=1, keepdim=True)
