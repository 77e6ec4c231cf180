"""The lookups of a model, by the caches that they are made in."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchembed.core.types import Pooling
from torchembed.modules.dense_part.forms import Combining
from torchembed.serving.levels import LeveledLookup, ServedFeature
from torchembed.serving.models.description import ModelDescription

_POOLING = {Combining.SUM: Pooling.SUM, Combining.MEAN: Pooling.MEAN, Combining.EACH: None}


class LookupPart(NamedTuple):
    """The lookups of a model that one call makes."""

    leveled: LeveledLookup
    numbers: list[int]
    """Places among the description's lookups."""
    features: list[ServedFeature]


def lookup_parts(
    description: ModelDescription,
    lookups: Mapping[str, LeveledLookup],
    store_names: Mapping[str, str],
) -> Iterator[LookupPart]:
    """The lookups of ``description``, those of one :class:`LeveledLookup` together."""
    parts: dict[int, LookupPart] = {}
    for number, lookup in enumerate(description.lookups):
        leveled = lookups[lookup.table]
        part = parts.setdefault(id(leveled), LookupPart(leveled, [], []))
        part.numbers.append(number)
        part.features.append(
            ServedFeature(
                name=str(number),
                table=store_names[lookup.table],
                pooling=_POOLING[lookup.combining],
            )
        )
    yield from parts.values()
