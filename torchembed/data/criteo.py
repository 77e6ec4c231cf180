"""Columns of the Criteo click logs, and table sizes and hotness of MLPerf's version of them."""

INT_NAMES: tuple[str, ...] = tuple(f"int_{column}" for column in range(13))
"""The 13 columns of counts, in the order of the files."""
CAT_NAMES: tuple[str, ...] = tuple(f"cat_{column}" for column in range(26))
"""The 26 columns of ids, in the order of the files."""

# MLPerf Training's DLRM-DCNv2 on Criteo 1TB: ids capped at 40 million a table, and the number of
# ids that each one-hot id becomes.
# fmt: off
MLPERF_TABLE_SIZES: tuple[int, ...] = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)
MLPERF_HOTNESS: tuple[int, ...] = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)
# fmt: on
