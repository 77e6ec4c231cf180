"""Requirements of ``torchembed::linearize_ids`` on its arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.core.types import OnBadId
from torchembed.ops.bags import check_bags

_ON_BAD_ID = frozenset(map(int, OnBadId))
_INT32_ROWS = 2**31


def check_linearize_ids(
    values: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    first_rows: Tensor,
    num_rows: Tensor,
    batch_size: int,
    on_bad_id: int,
    rows_dtype: torch.dtype,
) -> None:
    checks.check_ids("values", values)
    checks.check_contiguous("values", values)
    checks.check_dtype("first_rows", first_rows, (torch.int64,), "call .long()")
    checks.check_dtype("num_rows", num_rows, (torch.int64,), "call .long()")
    checks.check_same_device("values", values, first_rows=first_rows, num_rows=num_rows)
    num_features = first_rows.numel()
    checks.check_numel("num_rows", num_rows, num_features, "as first_rows has")
    checks.check_contiguous("first_rows", first_rows)
    checks.check_contiguous("num_rows", num_rows)
    check_bags("values", values, offsets, hotness, num_features, batch_size)
    if on_bad_id not in _ON_BAD_ID:
        raise ValueError(f"on_bad_id must be a value of OnBadId, got {on_bad_id}")
    if rows_dtype not in checks.ID_DTYPES:
        raise TypeError(f"rows_dtype must be int32 or int64, got {checks.dtype_name(rows_dtype)}")


def check_linearize_ids_contents(
    values: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    first_rows: Tensor,
    num_rows: Tensor,
    batch_size: int,
    on_bad_id: int,
    rows_dtype: torch.dtype,
) -> None:
    if offsets is not None:
        contents.check_offsets("offsets", offsets, values.numel())
    end = _INT32_ROWS if rows_dtype == torch.int32 else torch.iinfo(torch.int64).max
    advice = "rows are numbered within one flat weight, by rows_dtype"
    contents.check_in_range("first_rows", first_rows, 0, end, advice)
    contents.check_in_range("num_rows", num_rows, 0, end, advice)
    contents.check_in_range("first_rows + num_rows", first_rows + num_rows, 0, end, advice)


def check_locate_bad_id(
    values: Tensor, first_bad: Tensor, bounds: Tensor | None, location: Tensor
) -> None:
    checks.check_ids("values", values)
    checks.check_contiguous("values", values)
    if values.numel() == 0:
        raise ValueError("values must hold at least one id, got none")
    checks.check_dtype("first_bad", first_bad, (torch.int64,), "take it from linearize_ids")
    checks.check_numel("first_bad", first_bad, 1, "as linearize_ids gives it")
    checks.check_dtype("location", location, (torch.int64,), "make it by dtype=torch.int64")
    checks.check_same_device("values", values, first_bad=first_bad, bounds=bounds)
    checks.check_contiguous("location", location)
    if bounds is None:
        checks.check_numel("location", location, 2, "position and value")
    else:
        checks.check_dim("bounds", bounds, 1)
        checks.check_dtype("bounds", bounds, checks.ID_DTYPES, "call .long()")
        checks.check_numel("location", location, 4, "position, value, feature and its first id")
    checks.check_reachable("location", location, "values", values)
