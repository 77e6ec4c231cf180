"""The memory that rows take is known before they are written."""

import itertools

import pytest

from tests.support.memory_processes import CHUNK_BYTES, fill_a_store
from tests.support.store_processes import result_of
from torchembed.stores import OverflowPolicy, VolatileOptions, volatile_memory_bytes

COUNTED = OverflowPolicy.EVICT_LEAST_USED


@pytest.mark.parametrize(
    ("num_rows", "line_bytes", "options"),
    [
        # Little but keys: just before the index may double, and just behind.
        (470_000, 8, VolatileOptions(num_partitions=1)),
        (530_000, 8, VolatileOptions(num_partitions=8, overflow_policy=COUNTED)),
        (260_000, 512, VolatileOptions(num_partitions=8)),
        # Most rows go again.
        (200_000, 256, VolatileOptions(overflow_margin_rows=5000, max_batch_rows=1000)),
    ],
)
def test_a_process_grows_by_what_was_computed(
    num_rows: int, line_bytes: int, options: VolatileOptions
) -> None:
    computed = volatile_memory_bytes(num_rows, line_bytes, options)
    grown = result_of(fill_a_store, num_rows, line_bytes, options)
    # The chunk, and some copies of its rows and keys, are no part of the store.
    assert grown <= computed + 4 * CHUNK_BYTES
    # It is an upper bound, and no idle one: indexes may double a little later than it assumes.
    assert computed <= 2 * grown


def test_rows_of_512_bytes_take_at_most_a_third_more() -> None:
    for power, step in itertools.product(range(20, 31), range(8)):
        num_rows = 2**power * (8 + step) // 8
        assert volatile_memory_bytes(num_rows, 512) <= 1.3 * 512 * num_rows
