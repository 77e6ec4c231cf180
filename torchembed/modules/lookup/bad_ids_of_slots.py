"""Bad ids, named by the slots whose features they are of."""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.modules.lookup.bad_ids import BadIdReport
from torchembed.modules.lookup.feature_selection import bounds_of_features


class SlotName(NamedTuple):
    """The names of a slot in errors."""

    table: str
    feature: str
    num_rows: int


def submit_bad_id(
    features: SparseFeatures, first_bad: Tensor, names: Sequence[SlotName], report: BadIdReport
) -> None:
    """Have ``report`` raise where ``first_bad [1]`` is the position of an id.

    Raises:
        IndexError: naming table, feature, position among the feature's ids and value; when,
            :class:`BadIdReport` says.
    """
    batch_size, hotness = features.batch_size, features.hotness

    def describe(position: int, value: int, slot: int = 0, first: int = 0) -> str:
        if hotness is not None:
            bounds = list(itertools.accumulate((h * batch_size for h in hotness), initial=0))
            slot = bisect.bisect_right(bounds, position) - 1
            first = bounds[slot]
        name = names[slot]
        return (
            f"id out of range: table {name.table}, feature {name.feature}, position "
            f"{position - first} of the feature's ids, value {value}; ids of this table are in "
            f"[0, {name.num_rows}). Fix the data, enlarge the table, or pass "
            'on_bad_id="clamp" or "zero"'
        )

    bounds = None if hotness is not None else bounds_of_features(features)
    report.submit(features.values, first_bad, bounds, describe)
