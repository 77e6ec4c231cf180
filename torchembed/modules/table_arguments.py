"""Checks of the arguments of ``EmbeddingBag`` and ``Embedding``."""

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.modules.configs import check_dynamic, check_storage
from torchembed.tables import Dynamic, Normal, Storage


def check_arguments(
    torchs_name: str,
    *,
    num_embeddings: int,
    embedding_dim: int,
    padding_idx: int | None,
    refused: Mapping[str, object],
    weight: Tensor | None,
    dynamic: Dynamic | None,
) -> None:
    """Check arguments of a module of one table.

    Args:
        torchs_name: of the module of ``torch.nn`` that takes what is refused.
        others: as of :class:`~torchembed.modules.single_table.SingleTable`.

    Raises:
        ValueError: for one that is not supported, or does not fit the others.
        TypeError: for a size that is no whole number.
    """
    for name, size in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {size!r}")
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    for name, value in refused.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name}={value!r} is not supported; use torch.nn.{torchs_name} for it"
            )
    if dynamic is not None:
        if weight is not None:
            raise ValueError(
                "_weight must be None for a dynamic table, whose rows have no ids of their "
                "own; let it make its rows"
            )
        if num_embeddings < 1:
            raise ValueError(
                f"num_embeddings of a dynamic table must be positive, got {num_embeddings}"
            )
    elif padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"padding_idx must be in [-{num_embeddings}, {num_embeddings}), got {padding_idx}"
        )
    if weight is not None:
        checks.check_dim("_weight", weight, 2)
        if tuple(weight.shape) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"_weight must be {(num_embeddings, embedding_dim)}, got {tuple(weight.shape)}"
            )


def checked_dtype(
    dtype: torch.dtype | None,
    *,
    embedding_dim: int,
    dynamic: Dynamic | None,
    storage: Storage | None,
) -> torch.dtype:
    """The dtype of the rows of a module, by default torch's, where its table may have it.

    Raises:
        TypeError: for another dtype, or a ``storage`` that is none.
        ValueError: for policies or a ``storage`` that a table of this kind cannot have.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in (*checks.FLOAT_DTYPES, torch.float64):
        raise TypeError(
            "dtype must be torch.float32, torch.float16, torch.bfloat16 or torch.float64, "
            f"got {dtype!r}"
        )
    check_storage("this module", storage, dynamic, Normal())
    if storage is not None and dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            "dtype of a table in host memory or on disk must be float32, float16 or bfloat16, "
            f"which the optimizers of torchembed train, got {dtype}"
        )
    if dynamic is not None:
        if dtype not in checks.FLOAT_DTYPES:
            raise TypeError(
                "dtype of a dynamic table must be float32, float16 or bfloat16, whose rows are "
                f"made when their ids come, got {dtype}"
            )
        check_dynamic("this module", dynamic, Normal(), dim=embedding_dim, dtype=dtype)
    return dtype
