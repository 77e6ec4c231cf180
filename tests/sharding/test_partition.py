"""Partitions: ranges to the number, hashes that are even, and ids of any value on their way to the
rank of each."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_on_ranks
from tests.support.row_indices import DictFactory
from torchembed import SparseFeatures
from torchembed.core.random_bits import GOLDEN, MIX_FIRST, MIX_SECOND, signed64
from torchembed.core.types import OnBadId
from torchembed.modules.sharded.checked_ids import IdChecks
from torchembed.ops.hash_table import locate_keys
from torchembed.sharding import Placement
from torchembed.sharding.planning.partition import HashPartition, RangePartition
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.transport.bucketize_ids import bucketize_ids
from torchembed.sharding.transport.fixed_route import FixedRoute
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.sharding.transport.layout import Layout, slot_parts
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.sharding.wire import WirePrecision
from torchembed.tables import TableSpec

SPEC = TableSpec(name="t", num_rows=5, dim=4)
ROW_WISE = place_table("t", SPEC, Placement.ROW_WISE, (0, 1))
ANY_ID_SPEC = dataclasses.replace(SPEC, index=DictFactory())
DYNAMIC = place_table("t", ANY_ID_SPEC, Placement.ROW_WISE, (0, 1))
LOW, HIGH = -(2**63), 2**63 - 1
ANY_IDS = [-1, LOW, HIGH, 0, 7]


HASHED = HashPartition(ranks=(0, 1))
NUM_IDS = 1 << 16
SOME_IDS = {
    "sequential": torch.arange(NUM_IDS),
    "negative": -torch.arange(NUM_IDS),
    "strided by a power of two": torch.arange(NUM_IDS) << 32,
    "strided by the number of ranks": torch.arange(NUM_IDS) * 840,
    "strided by GOLDEN": torch.arange(NUM_IDS) * signed64(GOLDEN),
    "with a type in the high bits": torch.arange(NUM_IDS) | (37 << 56),
}


def most_chi_square(degrees: int) -> float:
    """The bound that a chi-square of ``degrees`` degrees exceeds once in 10**9 times, at most
    (Laurent and Massart, "Adaptive estimation of a quadratic functional", 2000, lemma 1)."""
    x = 9 * math.log(10)
    return degrees + 2 * math.sqrt(degrees * x) + 2 * x


def assert_even(places: Tensor, num_places: int) -> None:
    """Assert that ``places`` are as if drawn evenly."""
    expected = len(places) / num_places
    counts = torch.bincount(places, minlength=num_places).double()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert len(counts) == num_places
    assert chi_square <= most_chi_square(num_places - 1)


def place_in_python(row_id: int, num_ranks: int) -> int:
    value = (1 + (row_id + 1) * GOLDEN) % 2**64
    value = (value ^ value >> 30) * MIX_FIRST % 2**64
    value = (value ^ value >> 27) * MIX_SECOND % 2**64
    value ^= value >> 31
    return (value >> 32) * num_ranks >> 32


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("name", SOME_IDS)
def test_a_hash_spreads_ids_evenly(name: str, num_ranks: int) -> None:
    partition = HashPartition(ranks=tuple(range(num_ranks)))
    assert_even(partition.places_of(SOME_IDS[name]), num_ranks)


@pytest.mark.parametrize("name", SOME_IDS)
def test_the_ids_of_a_rank_spread_over_all_of_its_table(name: str) -> None:
    """Blocks, and buckets in them, are as even as for all ids: the hashes know nothing of each
    other."""
    partition, num_blocks, num_buckets = HashPartition(ranks=(0, 1, 2, 3)), 8, 16
    of_rank = SOME_IDS[name][partition.places_of(SOME_IDS[name]) == 2]
    geometry = torch.tensor([[0, num_blocks, num_buckets, 1]])
    keys = locate_keys(of_rank, torch.zeros(len(of_rank), dtype=torch.int32), geometry)
    assert_even(keys.buckets[:, 0], num_blocks * num_buckets)
    assert_even(keys.buckets[:, 1], num_blocks * num_buckets)


def test_a_rank_follows_from_the_id_and_the_number_of_ranks(device: torch.device) -> None:
    ids = [*ANY_IDS, *range(-20, 20)]
    for num_ranks in (1, 2, 3, 7):
        partition = HashPartition(ranks=tuple(range(5, 5 + num_ranks)))
        expected = [place_in_python(row_id, num_ranks) for row_id in ids]
        assert partition.places_of(torch.tensor(ids, device=device)).tolist() == expected
    few = torch.arange(-20, 20, dtype=torch.int32, device=device)
    assert torch.equal(HASHED.places_of(few), HASHED.places_of(few.long()))


def test_a_range_partition() -> None:
    """Ranks 1, 2 and 4 hold ids 0 and 1, 2 and 3, and 4."""
    plan = place_table("t", SPEC, Placement.ROW_WISE, (1, 2, 4))
    partition = RangePartition.of(plan.shards)
    assert (partition.ranks, partition.first_ids) == ((1, 2, 4), (0, 2, 4, 5))
    ids = torch.tensor([0, 3, 4, 5, -1, 1])
    assert partition.boundaries(6) == [0, 0, 2, 4, 4, 5, 5]
    partition.make_local(ids, 2)
    assert ids.tolist() == [-2, 1, 2, 3, -3, -1]


def mixed_layout() -> Layout:
    """A slot by ranges, and one whose ids may be any."""
    return Layout([*slot_parts(0, ROW_WISE), *slot_parts(1, DYNAMIC)], 2)


def test_a_layout_knows_where_partitions_are_no_ranges(device: torch.device) -> None:
    layout = mixed_layout()
    assert not layout.are_ranges
    assert layout.boundaries(device).tolist() == [[0, 3, 5], [0, 1, 2]]
    (is_hashed,) = layout.hashed_parts(device).values()
    assert is_hashed.tolist() == [False, True, False]
    assert Layout(slot_parts(0, ROW_WISE), 2).are_ranges
    ids = torch.tensor([0, 3, -1, -1, LOW, 0], device=device)
    is_valid = layout.make_local(ids, (3, 3), 1, 1)
    assert is_valid is not None
    # Of ranges the numbers say it.
    of_hash = [place_in_python(row_id, 2) == 1 for row_id in (-1, LOW, 0)]
    assert is_valid.tolist() == [True, True, True, *of_hash]
    assert ids.tolist() == [-3, 0, -4, -1, LOW, 0]


def test_ids_of_a_dynamic_table_on_one_rank_all_go_there(device: torch.device) -> None:
    table_wise = place_table("t", ANY_ID_SPEC, Placement.TABLE_WISE, (1,))
    layout = Layout([*slot_parts(0, table_wise), *slot_parts(1, ROW_WISE)], 2)
    ids = torch.tensor([*ANY_IDS, 4, 1, -1], device=device)
    offsets = torch.tensor([0, len(ANY_IDS), len(ids)], device=device)
    features = SparseFeatures(keys=("a", "b"), values=ids, batch_size=1, offsets=offsets)
    buckets = bucketize_ids(features, layout)
    assert buckets.values.tolist() == [1, -1, *ANY_IDS, 1]
    assert buckets.offsets.tolist() == [0, 0, 2, 2 + len(ANY_IDS), 3 + len(ANY_IDS)]


@pytest.mark.parametrize("fixed", [False, True])
def test_any_integer_may_pass_the_check_as_an_id(fixed: bool, device: torch.device) -> None:
    ids = torch.tensor([4, -1, 5, -1, LOW, HIGH], device=device)
    features = SparseFeatures(
        keys=("a", "b"),
        values=ids,
        batch_size=1,
        hotness=(3, 3) if fixed else None,
        offsets=None if fixed else torch.tensor([0, 3, 6], device=device),
    )
    checks = IdChecks([5, None], device)
    checked, first_bad = checks(features, OnBadId.RAISE)
    assert checked.dtype is checks.dtype is torch.int64
    assert checked.tolist() == [4, -1, -1, -1, LOW, HIGH]
    assert first_bad.tolist() == [1]


Found = dict[str, list[list[int]]]


def on_a_rank(_: str) -> Found:
    """The ids that arrive at each block, by the kind of route; each rank sends the same ones."""
    mesh = init_device_mesh("cpu", (2,))
    layout, ranks = mixed_layout(), TableRanks(mesh, (ROW_WISE,), WirePrecision())
    ids = torch.tensor([0, 4, -1, 2, -1, LOW, HIGH, 0])
    fixed = SparseFeatures(keys=("a", "b"), values=ids, batch_size=2, hotness=(2, 2))
    offsets = torch.tensor([0, 1, 4, 7, 8])
    jagged = SparseFeatures(keys=("a", "b"), values=ids, batch_size=2, offsets=offsets)
    found: Found = {}
    of_fixed = FixedRoute(fixed, [0, 1], layout, ranks)
    assert of_fixed.is_valid is not None
    found["fixed"] = _valid(of_fixed.features, of_fixed.is_valid.tolist())
    for name, capacity in (("announced", None), ("padded", 8)):
        route = JaggedRoute(jagged, layout, ranks)
        if capacity is None:
            route.exchange_sizes(ahead=False)
        route.exchange_ids(capacity)
        assert route.is_valid is None
        found[name] = _valid(route.features, [True] * route.features.values.numel())
    return found


def _valid(features: SparseFeatures, is_valid: Sequence[bool]) -> list[list[int]]:
    """The valid ids in the bags of each feature."""
    ids, bounds = features.values.tolist(), features.lengths().sum(1).cumsum(0).tolist()
    pairs = list(zip(ids, is_valid, strict=True))
    return [
        [number for number, valid in pairs[first:last] if valid]
        for first, last in zip([0, *bounds[:-1]], bounds, strict=True)
    ]


def test_ids_of_any_value_arrive_where_their_partition_says() -> None:
    """The ids ``[0, 4, -1, 2]`` by ranges of 3 and 2 rows, where -1 is no id, and of
    ``[-1, LOW, HIGH, 0]`` by a hash, where it is one; each twice, once from each rank."""
    first, second = run_on_ranks(2, on_a_rank, "")
    of_ranks = [
        [row_id for row_id in (-1, LOW, HIGH, 0) if place_in_python(row_id, 2) == rank]
        for rank in range(2)
    ]
    assert all(of_ranks)
    # What is in no range goes to all ranks, or to the first one, as -1 or another number below 0.
    assert first["fixed"] == [[0, 4, -1, 2] * 2, of_ranks[0] * 2]
    assert second["fixed"] == [[-3, 1, -4, -1] * 2, of_ranks[1] * 2]
    for way in ("announced", "padded"):
        assert first[way] == [[0, -1, 2] * 2, of_ranks[0] * 2]
        assert second[way] == [[1] * 2, of_ranks[1] * 2]
