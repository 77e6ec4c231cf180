"""Lookups of one table group for a batch, and who takes the gradients of its rows."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.core.piece_order import PieceOrder
from torchembed.core.stand_ins import KeptTensors
from torchembed.core.types import Pooling
from torchembed.modules.lookup.bad_ids_of_slots import SlotName
from torchembed.ops.linearize_ids.reference import id_features
from torchembed.ops.pooled_lookup import fixed_gradient_map
from torchembed.ops.row_gradients import GradientSink
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.segments import Runs
from torchembed.tables import FetchedRows, JoinedGroup, MissingVectors, Table, TableGroup

_NUM_MAPS = 4
"""The most gradient maps that are kept for lookups whose form may change with every batch."""


class GroupSlots:
    """The slots (uses of a table by a feature) that one group serves."""

    def __init__(
        self, group: TableGroup, slots: list[int], tables: list[Table], features: list[str]
    ) -> None:
        self.group = group
        self.slots = slots
        self.tables = tables
        self.names = [
            SlotName(table.spec.name, feature, table.num_rows)
            for table, feature in zip(tables, features, strict=True)
        ]
        self.index = group.index.for_tables([group.tables.index(table) for table in tables])
        self.changes_on_admission = group.changes_on_admission
        # Ids that may be bad are routed in any case, which checks them.
        self.admission_finds_rows = self.changes_on_admission and all(
            table.spec.num_ids is None for table in group.tables
        )
        self.reads_missing = group.reads_missing
        self.reorder = PieceOrder()
        self.gradient_maps: KeptTensors[Any, tuple[Tensor, Tensor]] = KeptTensors()
        """Maps by hotness, batch size and pooling; kept, since captured steps read them."""
        self.maps_of_forward: KeptTensors[Any, tuple[Tensor, Tensor]] = KeptTensors(_NUM_MAPS)
        """Maps of the first forms that were looked up in forward, likewise."""


class Ids(NamedTuple):
    """The ids of some slots."""

    features: SparseFeatures
    """One for each slot."""
    is_valid: Tensor | None = None
    """bool ``[L]``, False where a position of a bag holds no id of this rank's; None: all do, or an
    id outside its table says so by itself."""


class UntrainedSlots:
    """Slots that a backward does not train, since the loss does not depend on their vectors.

    Attributes:
        numbers: of the slots; set in the backward, before gradients of rows come.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()


class GroupRows(NamedTuple):
    """The lookups of one table group for a batch."""

    entry: GroupSlots
    features: SparseFeatures
    """A feature for each of the entry's slots; its values are rows of the group, -1 for none."""
    runs: Runs | None
    """Runs of equal rows, where they were found ahead for the optimizer's step."""
    ids: Ids | None = None
    """Kept for an index that admission changes, until then."""
    awaits_rows: bool = False
    """True until admission where it is to find the rows: the values of the features are any."""
    trained: Tensor | None = None
    """``[L]``: the rows as the update takes them, -1 for those that it leaves out; None where they
    are those of the features."""
    untrained: UntrainedSlots | None = None
    """Slots whose rows an update leaves out, if there may be any."""
    missing_ids: Ids | None = None
    """The ids, where those without a row are looked up as other values than zeros."""
    fetched: FetchedRows | None = None
    """The rows that were brought to the device, of a group that lives elsewhere; None: none."""

    def missing(self) -> MissingVectors | None:
        """The vectors of ids that have no row; None where they are zeros."""
        if self.missing_ids is None:
            return None
        entry, (features, is_valid) = self.entry, self.missing_ids
        return entry.group.missing_vectors(entry.index, features, self.features.values, is_valid)

    def gradient_map(self, pooling: Pooling, num_empty: int = 0) -> tuple[Tensor, Tensor] | None:
        """The map from positions of ``features`` to their gradients, where it was known before;
        ``num_empty`` features without ids come first."""
        features, maps = self.features, self.entry.gradient_maps
        if self.runs is None or features.hotness is None or features.weights is not None:
            return None
        hotness = (0,) * num_empty + features.hotness
        form = hotness, features.batch_size, pooling
        is_cuda = features.values.is_cuda
        if form not in maps and is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        find = functools.partial(
            fixed_gradient_map, hotness=hotness, batch_size=features.batch_size, pooling=pooling
        )
        return maps.get(form, lambda: find(features.values))

    def sink(self) -> GradientSink:
        """Takes the gradients of the rows, for the fused optimizer that updates the group.

        Raises:
            RuntimeError: where the tables have been regrouped since the rows were found.
        """
        group, tables = self.entry.group, self.entry.tables
        if any(group not in (table.group, table.group.joined) for table in tables):
            names = ", ".join(name.table for name in self.entry.names)
            raise RuntimeError(
                f"tables {names} were regrouped between prepare and forward, by an optimizer, a "
                "load or requires_grad_; prepare the batch again"
            )
        if self.trained is not None or self.untrained is not None:
            return self._record
        if isinstance(group, JoinedGroup):
            own_groups = [table.group for table in tables]
            return functools.partial(group.record_of, own_groups, runs=self.runs)
        return (
            group.record if self.runs is None else functools.partial(group.record, runs=self.runs)
        )

    def _record(self, rows: Tensor, gradients: RowGradients) -> None:
        """The sink where some of the rows are not trained."""
        entry, runs, tables = self.entry, self.runs, self.entry.tables
        rows = rows if self.trained is None else self.trained
        numbers = set[int]() if self.untrained is None else self.untrained.numbers
        left_out = [place for place, slot in enumerate(entry.slots) if slot in numbers]
        if left_out:
            rows, runs = self._without(left_out, rows), None
            tables = [table for n, table in enumerate(tables) if n not in left_out]
        if isinstance(entry.group, JoinedGroup):
            entry.group.record_of([table.group for table in tables], rows, gradients, runs)
        elif tables:
            entry.group.record(rows, gradients, runs)

    def _without(self, left_out: Sequence[int], rows: Tensor) -> Tensor:
        """``rows`` with -1 for those of some of the entry's slots."""
        features = self.features
        if features.hotness is None:
            numbers = id_features(
                features.offsets, [], features.batch_size, rows.numel(), rows.device
            )
            for number in left_out:
                rows = rows.masked_fill(numbers == number, -1)
            return rows
        pieces = list(rows.split([count * features.batch_size for count in features.hotness]))
        for number in left_out:
            pieces[number] = torch.full_like(pieces[number], -1)
        return torch.cat(pieces)
