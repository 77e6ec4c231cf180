"""Requirements of the ``torchembed::pooled_lookup_*`` operations on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.ops.bags import check_bags


def _check_weights(per_id_weights: Tensor | None, num_ids: int) -> None:
    if per_id_weights is not None:
        checks.check_float("per_id_weights", per_id_weights)
        checks.check_numel("per_id_weights", per_id_weights, num_ids, "one for each id")
        checks.check_contiguous("per_id_weights", per_id_weights)


def check_pooled_lookup_forward(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
    output_dtype: torch.dtype,
) -> None:
    checks.check_matrix("weight", weight)
    checks.check_ids("rows", rows)
    checks.check_contiguous("rows", rows)
    checks.check_same_device("weight", weight, rows=rows, per_id_weights=per_id_weights)
    check_bags("rows", rows, offsets, hotness, num_features, batch_size)
    _check_weights(per_id_weights, rows.numel())
    checks.check_output_dtype(output_dtype)


def check_pooled_lookup_forward_contents(
    weight: Tensor, rows: Tensor, offsets: Tensor | None, *_: object
) -> None:
    if offsets is not None:
        contents.check_offsets("offsets", offsets, rows.numel())
    contents.check_rows(rows, weight.shape[0])


def check_pooled_lookup_gradient_map(
    ids_like: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
) -> None:
    checks.check_dim("ids_like", ids_like, 1)
    checks.check_same_device("ids_like", ids_like, per_id_weights=per_id_weights)
    check_bags("ids_like", ids_like, offsets, hotness, num_features, batch_size)
    _check_weights(per_id_weights, ids_like.numel())


def check_pooled_lookup_gradient_map_contents(
    ids_like: Tensor, offsets: Tensor | None, *_: object
) -> None:
    if offsets is not None:
        contents.check_offsets("offsets", offsets, ids_like.numel())


def check_pooled_lookup_weights_backward(
    grad: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
) -> None:
    checks.check_float("grad", grad)
    checks.check_dim("grad", grad, 3)
    checks.check_contiguous("grad", grad)
    checks.check_matrix("weight", weight)
    batch_size, num_features, dim = grad.shape
    if dim != weight.shape[1]:
        raise ValueError(f"grad must have {weight.shape[1]} columns, got {dim}")
    checks.check_ids("rows", rows)
    checks.check_contiguous("rows", rows)
    checks.check_same_device("weight", weight, grad=grad, rows=rows)
    check_bags("rows", rows, offsets, hotness, num_features, batch_size)


def check_pooled_lookup_weights_backward_contents(
    grad: Tensor, weight: Tensor, rows: Tensor, offsets: Tensor | None, *_: object
) -> None:
    check_pooled_lookup_forward_contents(weight, rows, offsets)
