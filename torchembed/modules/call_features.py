"""The arguments of calls of ``EmbeddingBag`` and ``Embedding`` as sparse features."""

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.modules.calls_ahead import CallArguments
from torchembed.modules.lookup import bad_ids


def bags_as_feature(
    arguments: CallArguments, mode: str, include_last_offset: bool
) -> SparseFeatures:
    """The checked ``arguments`` of a bag's ``forward``, as one feature.

    Raises:
        TypeError, ValueError: for arguments that do not fit together, or the module's settings.
    """
    ids, offsets, per_sample_weights, count = arguments
    ids = checks.signed_ids("input", ids)
    if per_sample_weights is not None:
        if mode != "sum":
            raise ValueError(f'per_sample_weights needs mode="sum", got mode={mode!r}')
        if not per_sample_weights.is_floating_point():
            raise TypeError(
                "per_sample_weights must be floating-point numbers, got "
                f"{checks.dtype_name(per_sample_weights.dtype)}; call .float()"
            )
        if per_sample_weights.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of input, {tuple(ids.shape)}, "
                f"got {tuple(per_sample_weights.shape)}"
            )
        per_sample_weights = per_sample_weights.reshape(-1)
    if ids.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets must be None where input is two-dimensional")
        return SparseFeatures(
            keys=("input",),
            values=ids.reshape(-1),
            batch_size=ids.shape[0],
            hotness=(ids.shape[1],),
            weights=per_sample_weights,
        )
    if ids.dim() != 1:
        raise ValueError(f"input must have 1 or 2 dimensions, got shape {tuple(ids.shape)}")
    if offsets is None:
        raise ValueError("offsets must be given where input is one-dimensional, got None")
    checks.check_dim("offsets", offsets, 1)
    if not include_last_offset:
        end = offsets.new_full((1,), ids.numel()) if count is None else count.to(offsets.dtype)
        offsets = torch.cat([offsets, end])
    elif offsets.numel() == 0:
        raise ValueError("offsets must hold at least one element under include_last_offset")
    num_ids = ids.numel() if count is None or not bad_ids.is_readable(count) else int(count)
    bad_ids.check_offsets(offsets, num_ids)
    return SparseFeatures(
        keys=("input",),
        values=ids,
        batch_size=offsets.numel() - 1,
        offsets=offsets,
        weights=per_sample_weights,
    )


def ids_as_feature(ids: Tensor) -> SparseFeatures:
    """A bag for each id of ``ids [...]``."""
    ids = checks.signed_ids("input", ids)
    return SparseFeatures(
        keys=("input",), values=ids.reshape(-1), batch_size=ids.numel(), hotness=(1,)
    )


def looked_up_ids(ids: Tensor, num_ids: int, on_bad_id: OnBadId) -> Tensor:
    """``ids [L]`` as they are looked up in a table whose ids are in ``[0, num_ids)``, -1 for those
    that are not."""
    if on_bad_id is OnBadId.CLAMP:
        return ids.clamp(0, num_ids - 1)
    return ids.masked_fill((ids < 0) | (ids >= num_ids), -1)
