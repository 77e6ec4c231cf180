"""Requirements of the jagged operations on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.ops.bags import check_bags

_VALUE_DTYPES = (*checks.ID_DTYPES, *checks.FLOAT_DTYPES)


def _check_weights(weights: Tensor | None, values: Tensor) -> None:
    if weights is not None:
        checks.check_float("weights", weights)
        checks.check_dim("weights", weights, 1)
        checks.check_numel("weights", weights, values.numel(), "one for each id")
        checks.check_contiguous("weights", weights)
        checks.check_same_device("values", values, weights=weights)


def check_permutation(permutation: list[int], num_features: int) -> None:
    """Raise ``ValueError`` unless ``permutation`` holds features in ``[0, num_features)``."""
    if any(not 0 <= feature < num_features for feature in permutation):
        raise ValueError(
            f"permutation must hold features in [0, {num_features}), got {permutation}"
        )


def check_permute_features_forward(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_ids: int,
) -> None:
    checks.check_dtype("values", values, _VALUE_DTYPES, "call .float()")
    checks.check_dim("values", values, 1)
    checks.check_contiguous("values", values)
    check_bags("values", values, offsets, (), num_features, batch_size)
    _check_weights(weights, values)
    check_permutation(permutation, num_features)
    checks.check_not_negative("num_ids", num_ids)


def check_permute_features_forward_contents(values: Tensor, offsets: Tensor, *_: object) -> None:
    contents.check_offsets("offsets", offsets, values.numel())


def check_permute_features_backward(
    grad: Tensor,
    offsets: Tensor,
    new_offsets: Tensor,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_values: int,
) -> None:
    checks.check_dtype("grad", grad, _VALUE_DTYPES, "call .float()")
    checks.check_dim("grad", grad, 1)
    checks.check_contiguous("grad", grad)
    check_bags("grad", grad, offsets, (), num_features, batch_size)
    check_permutation(permutation, num_features)
    checks.check_dtype("new_offsets", new_offsets, (offsets.dtype,), "as offsets are")
    num_bags = len(permutation) * batch_size
    checks.check_numel(
        "new_offsets", new_offsets, num_bags + 1, "len(permutation) * batch_size + 1"
    )
    checks.check_contiguous("new_offsets", new_offsets)
    checks.check_same_device("grad", grad, new_offsets=new_offsets)
    checks.check_not_negative("num_values", num_values)


def check_permute_features_backward_contents(
    grad: Tensor,
    offsets: Tensor,
    new_offsets: Tensor,
    permutation: list[int],
    num_features: int,
    batch_size: int,
    num_values: int,
) -> None:
    contents.check_offsets("offsets", offsets, num_values)
    # They may end past the end of grad, where too small a capacity dropped the last ids.
    contents.check_ascending("new_offsets", new_offsets, "take them from permute_features_forward")


def check_bucketize_rows(
    values: Tensor, offsets: Tensor, weights: Tensor | None, boundaries: Tensor, batch_size: int
) -> None:
    checks.check_ids("values", values)
    if checks.reaches(values.shape[0], 2**31):
        raise ValueError(
            f"values must hold fewer than 2**31 ids, got {values.shape[0]}; split the batch"
        )
    checks.check_contiguous("values", values)
    checks.check_dtype("boundaries", boundaries, (torch.int64,), "call .long()")
    checks.check_dim("boundaries", boundaries, 2)
    if boundaries.shape[1] < 2:
        raise ValueError(
            "boundaries must have a column more than there are buckets, so 2 or more, "
            f"got shape {tuple(boundaries.shape)}"
        )
    checks.check_contiguous("boundaries", boundaries)
    checks.check_same_device("values", values, boundaries=boundaries)
    check_bags("values", values, offsets, (), boundaries.shape[0], batch_size)
    _check_weights(weights, values)


def check_bucketize_rows_contents(
    values: Tensor, offsets: Tensor, weights: Tensor | None, boundaries: Tensor, batch_size: int
) -> None:
    contents.check_offsets("offsets", offsets, values.numel())
    for feature, row in enumerate(boundaries):
        contents.check_ascending(f"boundaries[{feature}]", row, "they are ranges of rows")
