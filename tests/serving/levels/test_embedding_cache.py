"""Caches of rows: the kinds that are there, and what they refuse."""

import pytest

from torchembed.serving.levels import CacheKind, EmbeddingCache, RowFormat, ServedTable

TABLE = ServedTable(name="m/item", dim=4, row_format=RowFormat.FP32, default=0.0)


@pytest.mark.parametrize("kind", [CacheKind.STATIC, CacheKind.UVM])
def test_caches_of_whole_tables_are_refused(kind: CacheKind) -> None:
    with pytest.raises(ValueError, match=r"^kind must be CacheKind\.DYNAMIC, got CacheKind\."):
        EmbeddingCache([TABLE], num_rows=10, kind=kind)


def test_a_cache_needs_room_for_a_row_of_each_table() -> None:
    with pytest.raises(ValueError, match=r"room for at least 1 row of table 'm/item', got 0"):
        EmbeddingCache([TABLE], num_rows={"m/item": 0})
    with pytest.raises(ValueError, match=r"^give exactly one of num_rows and num_bytes, got None"):
        EmbeddingCache([TABLE])
