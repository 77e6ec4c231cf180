"""Numbers and ids of columns of Parquet files."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchembed.data.raw_ids import MISSING_ID, text_ids

if TYPE_CHECKING:
    import pyarrow as pa


def is_list(kind: "pa.DataType") -> bool:
    """True for lists of any kind."""
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_text(kind: "pa.DataType") -> bool:
    """True for texts, also encoded by a dictionary."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def dense_kind(kind: "pa.DataType") -> str:
    """In words what :func:`dense_column` takes a column of this type for."""
    import pyarrow.types as types

    return "counts (integers)" if types.is_integer(kind) else "numbers (floats or booleans)"


def id_kind(kind: "pa.DataType") -> str:
    """In words what :func:`id_column` takes a column of this type for."""
    of_ids = kind.value_type if is_list(kind) else kind
    ids = "texts" if is_text(of_ids) else "integers"
    return f"lists of {ids}" if is_list(kind) else ids


def dense_column(column: "pa.ChunkedArray") -> NDArray[np.float32]:
    """Numbers as they are, and the logarithms of counts; 0 where they are missing."""
    import pyarrow.types as types

    # Unsafe, since a safe cast refuses integers that float32 rounds.
    values = column.cast("float32", safe=False).fill_null(0.0).to_numpy()
    return np.log1p(np.maximum(values, 0)) if types.is_integer(column.type) else values


def id_column(
    column: "pa.ChunkedArray", size: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The ids of one column, int64, and the lengths of its lists where it holds lists.

    Args:
        column: integers, or lists of them; where ``size`` is None texts too.
        size: ids are taken modulo this, and a missing one is 0; None for ids as they stand.
    """
    import pyarrow.compute as compute

    lengths = None
    if is_list(column.type):
        lengths = (
            compute.call_function("list_value_length", [column])
            .fill_null(0)
            .to_numpy()
            .astype(np.int64)
        )
        column = compute.call_function("list_flatten", [column])
    if size is None:
        return _raw_ids(column), lengths
    ids = column.fill_null(0).to_numpy()
    # At full width, so that a table may have more rows than the ids' own type can count.
    wide = np.uint64 if ids.dtype.kind == "u" else np.int64
    return np.remainder(ids.astype(wide), wide(size)).astype(np.int64), lengths


def _raw_ids(column: "pa.ChunkedArray") -> NDArray[np.int64]:
    """The ids of integers or texts as they stand."""
    import pyarrow as pa

    is_missing = column.is_null().to_numpy()
    if is_text(column.type):
        # Each distinct text is hashed once.
        values = column.cast(pa.large_string()).fill_null("").combine_chunks()
        encoded = values.dictionary_encode()
        ids = text_ids(encoded.dictionary.to_pylist())[encoded.indices.to_numpy()]
    else:
        numbers = column.fill_null(0).to_numpy()
        ids = numbers.view(np.int64) if numbers.dtype == np.uint64 else numbers.astype(np.int64)
    return np.where(is_missing, MISSING_ID, ids)
