"""Ids of jagged features in a fixed number of places for each feature, some of them spare."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.stand_ins import KeptTensors
from torchembed.modules.lookup.feature_selection import bounds_of_features

_NUM_KEPT = 8
"""The most numbers of places for which constants are kept."""


class SpreadIds(NamedTuple):
    """The ids of ``F`` jagged features of ``B`` samples, each feature's first in places of its own.

    Offsets are those of the bags among the feature's places.
    """

    features: SparseFeatures
    """One sample, whose hotness is the number of each feature's places; ids of 0 in spare ones."""
    is_id: Tensor
    """bool ``[places of all features]``, False for a spare place."""
    offsets: Tensor
    """``[F, B + 1]``."""


class _Places(NamedTuple):
    """Constants of places."""

    features: Tensor
    """int64 ``[places of all features]``: the feature of each place."""
    positions: Tensor
    """int64 ``[places of all features]``: its position among those of the feature."""
    counts: Tensor
    """int64 ``[F, 1]``: how many there are."""


class IdSpreader:
    """Spreads the ids of batches of one kind, again and again."""

    def __init__(self) -> None:
        self._kept: KeptTensors[tuple[torch.device, tuple[int, ...]], _Places] = KeptTensors(
            _NUM_KEPT
        )

    def __call__(self, features: SparseFeatures, places: Sequence[int]) -> SpreadIds:
        """The ids of jagged ``features`` in ``places`` for each feature.

        Shapes follow from those of the arguments, and nothing is waited for. Ids of a feature that
        has more than places for them are left out; offsets then end at its places.
        """
        assert features.offsets is not None
        values, bounds = features.values, bounds_of_features(features)
        known = self._places(values.device, tuple(places))
        positions = bounds[:-1][known.features] + known.positions
        is_id = positions < bounds[1:][known.features]
        if len(values):
            read = values[positions.clamp_max(len(values) - 1)].masked_fill(~is_id, 0)
        else:  # a buffer without room for an id has none to read in its place
            read = values.new_zeros(len(positions))
        one_sample = SparseFeatures(
            keys=features.keys, values=read, batch_size=1, hotness=tuple(places)
        )
        bags = features.offsets.unfold(0, features.batch_size + 1, features.batch_size)
        offsets = (bags - bags[:, :1]).minimum(known.counts.to(bags.dtype))
        return SpreadIds(one_sample, is_id, offsets)

    def _places(self, device: torch.device, places: tuple[int, ...]) -> _Places:
        form = device, places
        is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_capturing and form not in self._kept:
            return _places(*form)  # in the graph's memory, which a later step may not read
        return self._kept.get(form, lambda: _places(*form))


def _places(device: torch.device, places: Sequence[int]) -> _Places:
    # Made on the device alone, since a copy from the host fits in no capture.
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return _Places(
        torch.cat([none, *(none.new_full((count,), f) for f, count in enumerate(places))]),
        torch.cat([none, *(torch.arange(count, device=device) for count in places)]),
        torch.cat([none, *(none.new_full((1,), count) for count in places)]).unsqueeze(1),
    )
