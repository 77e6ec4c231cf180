"""The cost of a placed table: bytes through memory and links in a step, and bytes held.

Letters: ``B`` samples of each rank, ``W`` ranks, ``h`` lookups a sample of a table, ``F`` features
that use it. A row that several ids share comes from memory once and then from the cache, and is
updated once. The number of different rows follows from that of one rank's batch, and is the same
share of every rank's rows: frequent ids are assumed to be scattered over the table.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from torchembed.core.types import OptimizerKind
from torchembed.ops.hash_table import BUCKET_SLOTS
from torchembed.ops.rowwise_update import UpdateRule
from torchembed.sharding.planning.distinct_rows import (
    expected_distinct,
    expected_misses,
    exponent_of,
)
from torchembed.sharding.planning.load_seconds import LoadSeconds
from torchembed.sharding.planning.loads import WIRES, Everywhere, Load
from torchembed.sharding.planning.plan import Placement, Shard, TablePlan
from torchembed.sharding.planning.storage_costs import HeldRows, host_line_bytes
from torchembed.sharding.planning.table_use import TableUse
from torchembed.sharding.wire import WirePrecision, WireTransport, vector_bytes
from torchembed.tables import Storage

ID_BYTES, ANY_ID_BYTES, LENGTH_BYTES = 4, 8, 8
"""Bytes of an id, of one of a dynamic table, and of a bag's length in an exchange. Tables of more
than 2**31 rows, whose ids take 8 bytes, are too rare to be told apart."""
ID_COPIES = 4
"""Buffers as long as a rank's ids: received ids, rows, sorted rows, and the sorting permutation."""
ROW_ACCESS_BYTES = 48
"""Overhead, in bytes, of reading or writing a row, its state or its gradient at random: it makes
narrow rows cost more by the byte. With it counted, lookups and updates reach the bandwidth of a
copy. This constant, the next one and the numbers of kernels in `load_seconds.py` are fitted to the
measurements that `bench.planning.costs` compares."""
NUM_PROBES = 2
"""The times that a batch's ids are looked up among those of a dynamic table: when they are routed,
and when they are admitted."""
CACHED_ROW_BYTE = 0.17
"""Weight of a byte that is read from the cache, because an earlier id has looked up the same
row."""
DENSE_PASSES = 6
"""Passes of a replicated table's dense gradient through memory: zeroed, summed (read and written),
packed, divided, read by the update."""
DENSE_COPIES = 3
"""Copies of that gradient in memory at a time: summed, packed with the marks of touched rows,
divided.
"""

RELAY_COPIES = 2
"""Copies of the largest of a rank's ids, vectors and gradients that are in memory on their way in
two levels: what a level sends, in its order, and what it receives."""

CHANNEL_COPIES = 8
"""Copies, at most, of the vectors that arrive by push: a channel has two halves, its size is
rounded up to a power of two, and lookups ahead of forward have another channel than those inside
it."""

STACK_PASSES = 2
"""Extra passes through memory of pooled vectors that several shards contribute to, on the rank of
the sample: stacked, and read again."""

SQUARE_BYTES = 4
"""Bytes of a row's sum of squares, which row-wise Adagrad adds up where columns are on several
ranks."""
SQUARE_PASSES = 4
"""Passes of all those ranks' squares through memory: gathered, stacked (read and written),
added."""
SUM_PASSES = 7
"""Passes of the summed gradients in that case: written, squared (read and written), added, divided
(read and written), read by the update."""
SUM_COPIES = 3
"""Copies of those gradients in memory at a time: summed, squared, divided."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel(LoadSeconds):
    """Costs of tables for one batch size, optimizer, wire, transport and topology."""

    batch_size: int
    """Samples of each rank."""
    rule: UpdateRule
    wire: WirePrecision
    fixed_hotness: bool
    hotness: Mapping[str, float]
    """Lookups a sample of each feature; 1 where not named."""
    distinct_ids: Mapping[str, float]
    """Different ids of each feature in a rank's batch; ids are uniform where not named."""
    transport: WireTransport = WireTransport.COLLECTIVE

    def _arrival_copies(self, use: TableUse) -> int:
        """Copies of a table's received vectors and gradients that are in memory at a time."""
        is_pushed = use.pooled and self.transport is WireTransport.PUSH
        return CHANNEL_COPIES if is_pushed else 1

    def _relay_copies(self) -> int:
        return RELAY_COPIES if self.topology.has_two_levels else 0

    def lookups(self, use: TableUse) -> float:
        """Lookups a sample of all the table's features."""
        return sum(self.hotness.get(feature, 1.0) for feature in use.features)

    def weight_bytes(self, use: TableUse, num_rows: int, num_columns: int) -> int:
        """Bytes of ``num_rows`` by ``num_columns`` of a table, of their optimizer state and, where
        it is dynamic, of their ids."""
        state = self.rule.state_bytes(num_rows, num_columns)
        rows = num_rows * num_columns * use.spec.dtype.itemsize
        return rows + state + use.index_bytes(num_rows)

    def line_bytes(self, use: TableUse, num_columns: int) -> int:
        """Bytes of ``num_columns`` of one row with their optimizer state."""
        row = num_columns * use.spec.dtype.itemsize
        return row + self.rule.state_bytes(1, num_columns)

    def host_line_bytes(self, use: TableUse, num_columns: int, storage: Storage | None) -> int:
        """Bytes of host memory that ``num_columns`` of one row take with their optimizer state."""
        row = num_columns * use.spec.dtype.itemsize
        return host_line_bytes(storage, row, self.rule.state_bytes(1, num_columns))

    def device_bytes(self, use: TableUse, shard: Shard, storage: Storage | None) -> int:
        """Bytes that a shard takes of its rank's memory: all but those on disk where that is the
        host's."""
        if storage is None:
            return self.weight_bytes(use, shard.num_rows, shard.num_columns)
        held, line_bytes = self._held(use, shard, storage)
        device_bytes = held.on_device * line_bytes + held.index_bytes
        if self.topology.devices_are_hosts:
            in_host = held.in_host * self.host_line_bytes(use, shard.num_columns, storage)
            device_bytes += in_host + held.host_index_bytes
        return device_bytes + use.index_bytes(shard.num_rows)

    def _held(self, use: TableUse, shard: Shard, storage: Storage) -> tuple[HeldRows, int]:
        """The memories that hold the rows of ``shard``, and the bytes of a row with its state."""
        line_bytes = self.line_bytes(use, shard.num_columns)
        return use.held_rows(storage, shard.num_rows, line_bytes), line_bytes

    def tier_loads(
        self, use: TableUse, shard: Shard, share: float, storage: Storage | None
    ) -> tuple[float, float, float, float]:
        """``HOST``, ``FETCHED``, ``DISK`` and ``READ`` of a shard with that ``share`` of its
        table's rows. All rows of a step are trained, so that each one that is fetched or read has
        another one written back."""
        if storage is None:
            return 0.0, 0.0, 0.0, 0.0
        held, line_bytes = self._held(use, shard, storage)
        in_host, fetched, read = 0.0, 0.0, 0.0
        if not self.topology.devices_are_hosts:
            host_line_bytes = self.host_line_bytes(use, shard.num_columns, storage)
            in_host = float(held.in_host * host_line_bytes + held.host_index_bytes)
            fetched = share * self.misses(use, held.on_device / share) * line_bytes
        if held.on_disk:
            rows = share * self.misses(use, held.in_host / share)
            read = rows * self.disk_line_bytes(line_bytes)
        return in_host, fetched, float(held.on_disk * line_bytes), read

    def disk_line_bytes(self, line_bytes: int) -> float:
        """The bytes that a line of ``line_bytes`` counts as where it comes from disk, with those
        that the disk moves while a processor reads a line and writes one."""
        disk = self.topology.disk
        return line_bytes + disk.line_seconds * self.topology.disk_bandwidth

    def misses(self, use: TableUse, cached: float) -> float:
        """Different rows of all ranks' batches that are not among ``cached`` rows which were used
        last, expected."""
        drawn = tuple(self._drawn(use, self.topology.num_ranks))
        return expected_misses(use.spec.num_rows, drawn, cached)

    def hit_rate(self, use: TableUse, cached: float) -> float:
        """The share of the different rows of all ranks' batches that are among them."""
        touched = self.touched(use, self.topology.num_ranks)
        return 1.0 - self.misses(use, cached) / touched if touched > 0 else 1.0

    def shard_load(
        self, use: TableUse, shard: Shard, share: float, storage: Storage | None = None
    ) -> np.ndarray:
        """float64 ``[len(Load)]``: one shard of a table that is not replicated, with that ``share``
        of its rows."""
        hotness = self.lookups(use)
        spec, num_ranks, num_samples = use.spec, self.topology.num_ranks, self.batch_size
        is_dynamic = spec.num_ids is None
        bags = num_samples * len(use.features)
        # With fixed hotness every rank that holds rows gets all ids and ignores those of others.
        # Jagged ids and ids of sequences are bucketized: each goes to the one rank that holds its
        # row, with the lengths of the bags.
        is_fixed = self.fixed_hotness and use.pooled
        sent = num_samples * hotness * (1.0 if is_fixed else share)
        id_bytes = ANY_ID_BYTES if is_dynamic else ID_BYTES
        ids = id_bytes * sent + (0 if is_fixed else LENGTH_BYTES * bags)
        lookups = num_ranks * num_samples * hotness * share
        touched = self.touched(use, num_ranks) * share
        vectors = bags if use.pooled else num_samples * hotness * share
        width = shard.num_columns
        out_itemsize = use.output_dtype.itemsize
        forward, backward = (
            vectors * vector_bytes(width, use.output_dtype, dtype)
            for dtype in (self.wire.forward, self.wire.backward)
        )
        weight_row = width * spec.dtype.itemsize
        return np.array(
            [
                num_ranks * ids
                + (_probed(lookups, touched) if is_dynamic else 0)
                + _looked_up(lookups, touched, weight_row)
                + num_ranks * vectors * width * out_itemsize,
                lookups * _accessed(width * out_itemsize) + touched * self._row_update(use, width),
                ids,
                forward,
                backward,
                self.device_bytes(use, shard, storage)
                + num_ranks * (ID_COPIES * ids + forward + self._arrival_copies(use) * backward)
                + num_ranks * self._relay_copies() * max(ids, forward, backward),
                *self.tier_loads(use, shard, share, storage),
            ]
        )

    def everywhere(self, use: TableUse, placement: Placement, loads: np.ndarray) -> Everywhere:
        """The costs of the table to every rank, given ``loads [shards, len(Load)]`` of its shards.

        For a replicated table these are all costs; for others those of sending ids and receiving
        vectors.
        """
        spec, num_samples, hotness = use.spec, self.batch_size, self.lookups(use)
        vectors = num_samples * (len(use.features) if use.pooled else hotness)
        output = vectors * spec.dim * use.output_dtype.itemsize
        if placement is not Placement.DATA_PARALLEL:
            ids, forward, backward = loads[:, WIRES].sum(axis=0)
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
            ids + _looked_up(lookups, self.touched(use, 1), weight_row) + output,
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

    def touched(self, use: TableUse, num_batches: float) -> float:
        """Different rows that ``num_batches`` of one rank each look up, expected."""
        return expected_distinct(use.spec.num_rows, self._drawn(use, num_batches))

    def _drawn(self, use: TableUse, num_batches: float) -> list[tuple[float, float]]:
        """For each feature the ids of ``num_batches``, and the exponent of their law."""
        num_rows, drawn = use.spec.num_rows, []
        for feature in use.features:
            num_ids, exponent = self.batch_size * self.hotness.get(feature, 1.0), 0.0
            if feature in self.distinct_ids:
                exponent = exponent_of(num_rows, num_ids, self.distinct_ids[feature])
            drawn.append((num_batches * num_ids, exponent))
        return drawn

    def table_loads(self, use: TableUse, plan: TablePlan) -> tuple[np.ndarray, Everywhere]:
        """Loads ``[shards, len(Load)]`` in the order of ``plan.shards``, zeros where replicated,
        and the costs to every rank."""
        loads = np.zeros((len(plan.shards), len(Load)))
        if plan.placement is not Placement.DATA_PARALLEL:
            # All shards but the last have one shape.
            known: dict[tuple[int, int], np.ndarray] = {}
            of_rows = {shard.first_row: shard.num_rows for shard in plan.shards}
            num_rows = sum(of_rows.values())
            for index, shard in enumerate(plan.shards):
                shape = (shard.num_rows, shard.num_columns)
                if shape not in known:
                    share = shard.num_rows / num_rows
                    known[shape] = self.shard_load(use, shard, share, plan.storage)
                loads[index] = known[shape]
        everywhere = self.everywhere(use, plan.placement, loads)
        by_columns = plan.placement is Placement.COLUMN_WISE and len(plan.shards) > 1
        if by_columns and self.rule.kind is OptimizerKind.ROWWISE_ADAGRAD:
            loads += self._squares_loads(use, plan)
        return loads, everywhere

    def _squares_loads(self, use: TableUse, plan: TablePlan) -> np.ndarray:
        """Loads ``[shards, len(Load)]`` that row-wise Adagrad adds, since it needs the squares of
        all columns.

        One square is counted for each lookup, since no rank waits to learn how many rows differ.
        Squares come from the ranks of the other shards, assumed to be any rank equally often.
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


def _looked_up(lookups: float, touched: float, row_bytes: int) -> float:
    """Weighted bytes of ``lookups`` of ``touched`` different rows."""
    return (touched + CACHED_ROW_BYTE * (lookups - touched)) * _accessed(row_bytes)


def _probed(lookups: float, touched: float) -> float:
    """Bytes through memory of finding ``lookups`` ids of ``touched`` different rows in a dynamic
    table, and of noting their use: the digests of two buckets and an id for each, and for each row
    the epoch of its last use, read and written."""
    probe = 2 * _accessed(BUCKET_SLOTS) + _accessed(ANY_ID_BYTES)
    found = touched + CACHED_ROW_BYTE * (lookups - touched)
    return NUM_PROBES * probe * found + 2 * _accessed(8) * touched


def _accessed(num_bytes: int) -> int:
    """Bytes that a random access of ``num_bytes`` counts as."""
    return num_bytes + ROW_ACCESS_BYTES
