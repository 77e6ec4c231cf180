"""Rows for the ids of a data set."""

from typing import NamedTuple

from recipes.ctr.config import CtrConfig
from recipes.ctr.rows import Rows
from recipes.dynamic import num_rows


class TabledRows(NamedTuple):
    """A data set whose ids are what tables look up."""

    rows: Rows
    num_rows: dict[str, int]
    """Rows of each feature's table."""


def rows_in_tables(config: CtrConfig, rows: Rows) -> TabledRows:
    """Ids and table sizes of ``rows``, whose ids are the numbers of their values.

    The data's own ids come to dynamic tables as they stand. To others they come modulo the rows, so
    that several may share one, where there is a capacity, and else as the numbers.
    """
    sizes = {
        name: num_rows(config.capacity, feature.num_ids) for name, feature in rows.features.items()
    }
    if config.capacity is None and config.dynamic:
        # Hash tables refuse ids before their last row is taken, and those of ranks get ids by a
        # hash, some more than others.
        sizes = {name: size + size // 4 + 64 for name, size in sizes.items()}
    if config.capacity is None and not config.dynamic:
        return TabledRows(rows, sizes)
    ids = {name: feature.raw_ids for name, feature in rows.features.items()}
    if not config.dynamic:
        ids = {name: raw_ids % sizes[name] for name, raw_ids in ids.items()}
    return TabledRows(rows.mapped(ids), sizes)
