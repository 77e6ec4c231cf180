"""The ids of slots whose tables have one width, on their way to the ranks of their rows, and their
vectors on the way back."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.modules.embedding_collection import (
    SequenceVectors,
    fixed_offsets,
    group_vectors,
    sequence_slots,
)
from torchembed.modules.lookup.feature_selection import (
    lengths_of_features,
    offsets_of_features,
    select_features,
)
from torchembed.modules.lookup.slots import SlotRows
from torchembed.modules.lookup.spread_ids import IdSpreader
from torchembed.modules.sharded.sharded_collection import SlotExchange
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.transport.fixed_route import FixedRoute
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.sharding.transport.moved_rows import RowMoves, moved, moves_from, moves_to
from torchembed.sharding.transport.table_ranks import TableRanks


class JaggedParts(NamedTuple):
    """Ids that are sorted by the rank of their rows."""

    features: SparseFeatures
    """One for each part."""
    route: JaggedRoute
    num_ids: list[int] | None
    """Number of ids of each part; None where the host does not know."""

    def needed_capacity(self) -> Tensor:
        """The capacity that :func:`send_jagged` must be given, ``[n]``: the most ids that go to one
        rank, and, where the host does not know them, the numbers of ids of the parts."""
        needed = self.route.needed_capacity().reshape(1)
        if self.num_ids is not None:
            return needed
        return torch.cat([needed, lengths_of_features(self.features).to(needed.dtype)])


class SentSequences(NamedTuple):
    """The ids of all ranks' samples whose rows this rank holds."""

    route: FixedRoute | JaggedRoute
    rows: SlotRows
    num_ids: list[int]
    """Number of ids of each part, or of places for them; of this rank's samples."""
    offsets: Tensor | None
    """``[parts, B + 1]``; None for fixed hotness."""
    received: RowMoves | None
    """From the vectors of the row's groups to those of the ids as they came; None for fixed
    hotness."""
    home: RowMoves | None
    """From the vectors as they come home to those of the parts, one part after the other; None for
    fixed hotness."""


def send_fixed(
    exchange: SlotExchange,
    batch: SparseFeatures,
    ranks: TableRanks,
    batch_sizes: Sequence[int] | None,
) -> SentSequences:
    """Send the ids of ``batch``, which has a feature of fixed hotness for each slot; collective."""
    parts, layout, local = exchange
    of_parts = [part.slot for part in parts]
    route = FixedRoute(batch, of_parts, layout, ranks, batch_sizes)
    rows = local.route(route.features, None, route.is_valid)
    assert batch.hotness is not None
    num_ids = [batch.hotness[slot] * batch.batch_size for slot in of_parts]
    return SentSequences(route, rows, num_ids, None, None, None)


def send_jagged(
    exchange: SlotExchange,
    parts: JaggedParts,
    spread_ids: IdSpreader,
    capacity: Iterator[int] | None,
) -> SentSequences:
    """Send the ids of ``parts``; collective.

    Args:
        capacity: begins with what :meth:`JaggedParts.needed_capacity` says, where sizes were not
            exchanged.
    """
    features, route, num_ids = parts
    has_capacity = capacity is not None
    route.exchange_ids(next(capacity) if has_capacity else None)
    received = route.features
    rows = exchange.local.route(
        received, route.num_ids_of_blocks, route.is_valid, has_capacity=has_capacity
    )
    # The positions go where the ids went.
    positions = SparseFeatures(
        keys=received.keys,
        values=route.received_order(),
        batch_size=received.batch_size,
        offsets=received.offsets,
    )
    targets = [received.values.new_zeros(0, dtype=torch.int64)]
    for of_group in rows.groups:
        slots, count = of_group.entry.slots, of_group.features.values.shape[0]
        of_slots = select_features(positions, slots, count)
        assert of_slots.offsets is not None
        is_spare = torch.arange(count, device=of_slots.values.device) >= of_slots.offsets[-1]
        targets.append(of_slots.values.masked_fill(is_spare, -1))
    places, offsets = route.home_places(), offsets_of_features(features)
    if num_ids is None:
        assert capacity is not None
        num_ids = [next(capacity) for _ in features.keys]
        spread = spread_ids(_with_values(features, places), num_ids)
        places, offsets = spread.features.values.where(spread.is_id, -1), spread.offsets
    return SentSequences(
        route,
        rows,
        num_ids,
        offsets,
        moves_to(torch.cat(targets), received.values.shape[0]),
        moves_from(places[: sum(num_ids)], route.num_home),
    )


def returned_sequences(
    sent: SentSequences, width: int, output_dtype: torch.dtype, weight_form: WeightGradient
) -> SequenceVectors:
    """For each part ``([ids, width], offsets [B + 1])`` of this rank's samples; collective."""
    route, rows = sent.route, sent.rows
    none = torch.empty(0, width, dtype=output_dtype, device=rows.device)
    if isinstance(route, FixedRoute):
        hotness, batch_size = route.features.hotness, route.features.batch_size
        assert hotness is not None
        num_ids = [count * batch_size for count in hotness]
        looked_up = sequence_slots(rows, num_ids, None, output_dtype, weight_form)
        returned = route.return_sequences(torch.cat([none, *(values for values, _ in looked_up)]))
        bags = fixed_offsets(route.hotness, route.num_samples, rows.device)
        return list(zip(returned.split(sent.num_ids), bags, strict=True))
    assert sent.received is not None
    assert sent.home is not None
    assert sent.offsets is not None
    of_groups = group_vectors(rows, output_dtype, weight_form)
    vectors = of_groups[0] if len(of_groups) == 1 else torch.cat([none, *of_groups])
    returned = moved(route.send_home(moved(vectors, sent.received)), sent.home)
    return list(zip(returned.split(sent.num_ids), sent.offsets.unbind(), strict=True))


def _with_values(features: SparseFeatures, values: Tensor) -> SparseFeatures:
    return SparseFeatures(
        keys=features.keys,
        values=values,
        batch_size=features.batch_size,
        offsets=features.offsets,
    )
