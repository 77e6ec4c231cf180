"""The check of ids before they are sent to the ranks that hold their rows."""

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.ops.linearize_ids import LinearRows, linearize_ids
from torchembed.ops.linearize_ids.reference import id_features


def checked_ids(
    features: SparseFeatures,
    num_ids: Tensor,
    takes_any_id: Tensor | None,
    on_bad_id: OnBadId,
    dtype: torch.dtype,
) -> LinearRows:
    """The ids of ``features``, with -1 (or the nearest id) for each that is outside its table, and
    the first position of such a one. A table that takes any id has none, and -1 is one of its ids.

    Args:
        num_ids: int64 ``[F]``: ids of each feature's table are in ``[0, num_ids)``.
        takes_any_id: bool ``[F]``, True where they are any integers, whatever ``num_ids`` says;
            None where no table's are.
        dtype: of the result, int32 or int64; int64 where a table takes any id.
    """
    values, is_free = features.values, None
    if takes_any_id is not None:
        of_positions = id_features(
            features.offsets,
            list(features.hotness or ()),
            features.batch_size,
            values.numel(),
            values.device,
        )
        # Behind the last bag there is one more feature.
        is_free = torch.nn.functional.pad(takes_any_id, (0, 1))[of_positions]
        values = values.masked_fill(is_free, 0)
    ids, first_bad = linearize_ids(
        values,
        torch.zeros_like(num_ids),
        num_ids,
        offsets=features.offsets,
        hotness=features.hotness,
        batch_size=features.batch_size,
        on_bad_id=on_bad_id,
        rows_dtype=dtype,
    )
    if is_free is not None:
        ids = torch.where(is_free, features.values.to(dtype), ids)
    return LinearRows(ids, first_bad)
