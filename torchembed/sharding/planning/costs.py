"""What a placed table costs: bytes that memory and wires move in a step, bytes held, seconds.

Letters: ``B`` samples of each rank, ``W`` ranks, ``h`` lookups a sample of a table, ``F`` features
that use it. A row that several ids share comes from memory once and then from the cache, and is
updated once; how many different rows there are follows from how many a rank's batch has, and is the
same share of each rank's rows: frequent ids are taken to be scattered over the table.
"""

import dataclasses
import enum
import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.distinct_rows import expected_distinct, exponent_of
from torchembed.sharding.planning.plan import Placement, Shard, TablePlan
from torchembed.sharding.planning.topology import Topology
from torchembed.sharding.wire import WirePrecision, WireTransport
from torchembed.tables import TableSpec

ID_BYTES, LENGTH_BYTES = 4, 8
"""On the way; tables of more than 2**31 rows, whose ids take 8 bytes, are as good as none."""
ID_COPIES = 4
"""Buffers as long as a rank's ids: as received, as rows, sorted, and their order."""
ROW_ACCESS_BYTES = 48
"""What reading or writing a row, its state or its gradient costs beside its bytes, wherever in
memory it lies: narrow rows cost more by the byte. With it lookups and updates reach a copy's
bandwidth. It, the next one and the numbers of kernels are fitted to what `bench.planning.costs`
compares."""
CACHED_ROW_BYTE = 0.17
"""How much a byte counts of a row that the cache holds, since an id before has looked it up."""
DENSE_PASSES = 6
"""Of a replicated table's dense gradient through memory: zeroed, summed (read and written), packed,
divided, read by the update."""
DENSE_COPIES = 3
"""Of it in memory at a time: as summed, packed with the touched rows' marks, divided."""

CHANNEL_COPIES = 8
"""At most, of what arrives by push: in two halves of a channel, whose size is a power of two; of
lookups ahead of forward, and of those in it, as the first step's are."""

LOOKUP_KERNELS, UPDATE_KERNELS = 0.8, 3
"""So many times what a kernel takes beside its bytes, for each group of a rank's tables that are
looked up and updated in one call; those that are replicated on several ranks are a group."""
ALL_REDUCE_EXCHANGES = 1.5
"""So many times what an exchange takes beside its bytes."""

STACK_PASSES = 2
"""Of what several shards' rows add to the same vectors through memory where these come home, beside
what every vector costs: stacked and read again."""

SQUARE_BYTES = 4
"""Of a row's sum of squares, which row-wise Adagrad adds up where columns are on several ranks."""
SQUARE_PASSES = 4
"""Of those of all these ranks through memory: gathered, stacked (read and written), added."""
SUM_PASSES = 7
"""Of its summed gradients then: written, squared (read and written), added, divided (read and
written), read by the update."""
SUM_COPIES = 3
"""Of them in memory at a time: as summed, squared, divided."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableUse:
    """A whole table and how a model uses it."""

    spec: TableSpec
    features: tuple[str, ...]
    """That are looked up in it."""
    pooled: bool = True
    """False: one vector for each id."""
    output_dtype: torch.dtype = torch.float32

    def table_group(self, num_columns: int) -> Hashable:
        """What a rank's shards have in common that it looks up and updates in one call."""
        return num_columns, self.spec.dtype, self.pooled


class Load(enum.IntEnum):
    """What a shard costs the rank that holds it; the columns of load arrays."""

    LOOKUP = 0
    """Bytes through memory in forward, those from the cache by their weight."""
    UPDATE = 1
    """Bytes through memory in backward and in the optimizer's step, likewise."""
    IDS = 2
    """Bytes of ids that each rank sends it."""
    VECTORS = 3
    """Bytes of vectors that it sends each rank."""
    GRADIENTS = 4
    """Bytes of gradients, and of their squares where those are exchanged, that each rank sends it.
    """
    HELD = 5
    """Bytes of rows, their optimizer state, and buffers."""


WIRES = slice(Load.IDS, Load.HELD)


class Everywhere(NamedTuple):
    """What a table costs every rank, whoever holds it."""

    lookup_bytes: float = 0.0
    update_bytes: float = 0.0
    all_reduce_bytes: float = 0.0
    """Of a replicated table's gradients."""
    held_bytes: float = 0.0

    def plus(self, other: "Everywhere") -> "Everywhere":
        return Everywhere(*(a + b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of tables for one batch size, optimizer, wire, transport and topology."""

    topology: Topology
    batch_size: int
    """Samples of each rank."""
    rule: UpdateRule
    wire: WirePrecision
    fixed_hotness: bool
    hotness: Mapping[str, float]
    """Lookups a sample of each feature; 1 where not named."""
    distinct_ids: Mapping[str, float]
    """Different ids of each feature in a rank's batch; as of uniform ids where not named."""
    transport: WireTransport = WireTransport.COLLECTIVE

    def _arrival_copies(self, use: TableUse) -> int:
        """Of what arrives of a table's vectors and their gradients, in memory at a time."""
        is_pushed = use.pooled and self.transport is WireTransport.PUSH
        return CHANNEL_COPIES if is_pushed else 1

    def lookups(self, use: TableUse) -> float:
        """Lookups a sample of all the table's features."""
        return sum(self.hotness.get(feature, 1.0) for feature in use.features)

    def weight_bytes(self, use: TableUse, num_rows: int, num_columns: int) -> int:
        """Rows and optimizer state of so much of a table."""
        state = self.rule.state_bytes(num_rows, num_columns)
        return num_rows * num_columns * use.spec.dtype.itemsize + state

    def shard_load(self, use: TableUse, shard: Shard) -> np.ndarray:
        """float64 ``[6]``, by :class:`Load`: one shard of a table that is not replicated."""
        hotness = self.lookups(use)
        spec, num_ranks, num_samples = use.spec, self.topology.num_ranks, self.batch_size
        share = shard.num_rows / spec.num_rows
        bags = num_samples * len(use.features)
        # Fixed hotness sends ids to every rank that holds rows, which picks its own; jagged ids and
        # those of sequences, go where their rows are, with the length of each bag.
        is_fixed = self.fixed_hotness and use.pooled
        sent = num_samples * hotness * (1.0 if is_fixed else share)
        ids = ID_BYTES * sent + (0 if is_fixed else LENGTH_BYTES * bags)
        lookups = num_ranks * num_samples * hotness * share
        touched = self._touched(use, num_ranks) * share
        vectors = bags if use.pooled else num_samples * hotness * share
        width = shard.num_columns
        out_itemsize = use.output_dtype.itemsize
        forward = vectors * width * _wire_itemsize(self.wire.forward, use)
        backward = vectors * width * _wire_itemsize(self.wire.backward, use)
        weight_row = width * spec.dtype.itemsize
        return np.array(
            [
                num_ranks * ids
                + _looked_up(lookups, touched, weight_row)
                + num_ranks * vectors * width * out_itemsize,
                lookups * _accessed(width * out_itemsize) + touched * self._row_update(use, width),
                ids,
                forward,
                backward,
                self.weight_bytes(use, shard.num_rows, width)
                + num_ranks * (ID_COPIES * ids + forward + self._arrival_copies(use) * backward),
            ]
        )

    def everywhere(self, use: TableUse, placement: Placement, loads: np.ndarray) -> Everywhere:
        """What the table costs every rank, with ``loads [shards, 6]`` of its shards.

        Of a replicated table that is all; of others the ids that leave and the vectors that arrive.
        """
        spec, num_samples, hotness = use.spec, self.batch_size, self.lookups(use)
        vectors = num_samples * (len(use.features) if use.pooled else hotness)
        output = vectors * spec.dim * use.output_dtype.itemsize
        if placement is not Placement.DATA_PARALLEL:
            _, _, ids, forward, backward, _ = loads.sum(axis=0)
            by_rows = placement in (Placement.ROW_WISE, Placement.TABLE_ROW_WISE)
            is_summed = use.pooled and by_rows and len(loads) > 1
            stacked = len(loads) * output if is_summed else 0.0
            held = ids + self._arrival_copies(use) * forward + backward + stacked + 2 * output
            if self.topology.num_ranks == 1:
                # Lookups write their vectors where the model reads them.
                return Everywhere(held_bytes=held)
            arrived = forward + STACK_PASSES * stacked + output
            return Everywhere(arrived, backward + output, 0.0, held)
        lookups = num_samples * hotness
        dense = spec.num_rows * (spec.dim + 1) * 4
        ids = ID_BYTES * lookups
        weight_row = spec.dim * spec.dtype.itemsize
        gradients = lookups * _accessed(spec.dim * use.output_dtype.itemsize)
        return Everywhere(
            ids + _looked_up(lookups, self._touched(use, 1), weight_row) + output,
            gradients + DENSE_PASSES * dense + spec.num_rows * self._row_update(use, spec.dim),
            dense,
            self.weight_bytes(use, spec.num_rows, spec.dim)
            + ID_COPIES * ids
            + DENSE_COPIES * dense
            + 2 * output,
        )

    def _row_update(self, use: TableUse, width: int) -> float:
        """Bytes that updating one row of ``width`` columns reads and writes."""
        state = math.prod(self.rule.state_shape(1, width)) * 4
        row = _accessed(width * use.spec.dtype.itemsize)
        return 2 * (row + self.rule.num_states * _accessed(state))

    def _touched(self, use: TableUse, num_ranks: int) -> float:
        """Different rows that the batches of ``num_ranks`` ranks look up, expected."""
        num_rows, drawn = use.spec.num_rows, []
        for feature in use.features:
            num_ids, exponent = self.batch_size * self.hotness.get(feature, 1.0), 0.0
            if feature in self.distinct_ids:
                exponent = exponent_of(num_rows, num_ids, self.distinct_ids[feature])
            drawn.append((num_ranks * num_ids, exponent))
        return expected_distinct(num_rows, drawn)

    def lookup_seconds(self, num_bytes: Any, num_groups: Any = 0) -> Any:
        """Of ``LOOKUP`` bytes in so many groups of tables; numbers or arrays."""
        fixed = LOOKUP_KERNELS * self.topology.kernel_seconds
        return num_bytes / self.topology.memory_bandwidth + num_groups * fixed

    def update_seconds(self, num_bytes: Any, num_groups: Any = 0) -> Any:
        """Of ``UPDATE`` bytes in so many groups of tables; numbers or arrays."""
        fixed = UPDATE_KERNELS * self.topology.kernel_seconds
        return num_bytes / self.topology.memory_bandwidth + num_groups * fixed

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """A reduce-scatter and an all-gather within nodes, and between them of each rank's part."""
        nodes, per_node = self.topology.num_nodes, self.topology.ranks_per_node
        within = 2 * num_bytes * (per_node - 1) / per_node / self.topology.intra_node_bandwidth
        part = num_bytes / per_node
        return within + 2 * part * (nodes - 1) / nodes / self.topology.inter_node_bandwidth

    def wire_seconds(self, loads: np.ndarray) -> np.ndarray:
        """float64 ``[W, 3]``: of each rank the busiest link and direction in the three exchanges.

        Args:
            loads: ``[W, 6]``, what each rank holds. The ids that it takes in, the vectors that it
                sends and the gradients that it takes in are its own; in the other direction goes
                what all others hold.
        """
        topology = self.topology
        per_node, num_ranks = topology.ranks_per_node, topology.num_ranks
        own = loads[:, WIRES]
        of_nodes = own.reshape(topology.num_nodes, per_node, 3).sum(axis=1)
        of_node = np.repeat(of_nodes, per_node, axis=0)
        total = of_nodes.sum(axis=0)
        within = np.maximum((per_node - 1) * own, of_node - own) / topology.intra_node_bandwidth
        between = np.maximum((num_ranks - per_node) * own, total - of_node)
        return np.maximum(within, between / topology.inter_node_bandwidth)

    def rank_seconds(
        self, loads: np.ndarray, everywhere: Everywhere, num_groups: Any = 0
    ) -> np.ndarray:
        """float64 ``[W]``: memory and the busiest link, one after the other.

        Args:
            num_groups: of each rank's tables, ``[W]``, the replicas among them.
        """
        lookup = self.lookup_seconds(loads[:, Load.LOOKUP] + everywhere.lookup_bytes, num_groups)
        update = self.update_seconds(loads[:, Load.UPDATE] + everywhere.update_bytes, num_groups)
        common = self.all_reduce_seconds(everywhere.all_reduce_bytes)
        return lookup + update + self.wire_seconds(loads).sum(axis=1) + common

    def holder_seconds(self, loads: np.ndarray) -> np.ndarray:
        """float64 ``[n]``: what each of ``loads [n, 6]`` adds to a rank that is busy holding."""
        topology = self.topology
        per_node, num_ranks = topology.ranks_per_node, topology.num_ranks
        wire = max(
            (per_node - 1) / topology.intra_node_bandwidth,
            (num_ranks - per_node) / topology.inter_node_bandwidth,
        )
        lookup = self.lookup_seconds(loads[:, Load.LOOKUP])
        update = self.update_seconds(loads[:, Load.UPDATE])
        return lookup + update + wire * loads[:, WIRES].sum(axis=1)

    def table_loads(self, use: TableUse, plan: TablePlan) -> tuple[np.ndarray, Everywhere]:
        """``[shards, 6]`` in the order of ``plan.shards``, zeros where replicated; and the rest."""
        loads = np.zeros((len(plan.shards), len(Load)))
        if plan.placement is not Placement.DATA_PARALLEL:
            # All shards but the last have one shape.
            known: dict[tuple[int, int], np.ndarray] = {}
            for index, shard in enumerate(plan.shards):
                shape = (shard.num_rows, shard.num_columns)
                if shape not in known:
                    known[shape] = self.shard_load(use, shard)
                loads[index] = known[shape]
        everywhere = self.everywhere(use, plan.placement, loads)
        by_columns = plan.placement is Placement.COLUMN_WISE and len(plan.shards) > 1
        if by_columns and self.rule.kind is OptimizerKind.ROWWISE_ADAGRAD:
            loads += self._squares_loads(use, plan)
        return loads, everywhere

    def _squares_loads(self, use: TableUse, plan: TablePlan) -> np.ndarray:
        """What it adds to ``[shards, 6]`` that row-wise Adagrad takes the squares of all columns.

        One for each lookup, since no rank waits to know how many rows differ. They come from the
        other shards' ranks, of which every rank is taken to be one as often.
        """
        num_ranks, num_shards = self.topology.num_ranks, len(plan.shards)
        lookups = num_ranks * self.batch_size * self.lookups(use)
        squares = SQUARE_BYTES * lookups
        widths = np.array([shard.num_columns for shard in plan.shards])
        summed = 4 * lookups * widths
        loads = np.zeros((num_shards, len(Load)))
        loads[:, Load.UPDATE] = SUM_PASSES * summed + SQUARE_PASSES * num_shards * squares
        loads[:, Load.GRADIENTS] = squares * (num_shards - 1) / (num_ranks - 1)
        loads[:, Load.HELD] = SUM_COPIES * summed + 2 * num_shards * squares
        return loads


def _wire_itemsize(dtype: torch.dtype | None, use: TableUse) -> int:
    """Bytes that a number of ``use``'s vectors takes on its way: the narrower of the two."""
    out = use.output_dtype.itemsize
    return out if dtype is None else min(dtype.itemsize, out)


def _looked_up(lookups: float, touched: float, row_bytes: int) -> float:
    return (touched + CACHED_ROW_BYTE * (lookups - touched)) * _accessed(row_bytes)


def _accessed(num_bytes: int) -> int:
    return num_bytes + ROW_ACCESS_BYTES
