"""Partitions: ranges to the number, and ids of any value on their way to the rank of each."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_on_ranks
from torchembed import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.modules.sharded.checked_ids import checked_ids
from torchembed.sharding import Placement
from torchembed.sharding.planning.partition import RangePartition
from torchembed.sharding.planning.plan import place_table
from torchembed.sharding.transport.fixed_route import FixedRoute
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.sharding.transport.layout import Layout, SlotPart, slot_parts
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.sharding.wire import WirePrecision
from torchembed.tables import TableSpec

SPEC = TableSpec(name="t", num_rows=5, dim=4)
ROW_WISE = place_table("t", SPEC, Placement.ROW_WISE, (0, 1))
LOW, HIGH = -(2**63), 2**63 - 1


@dataclasses.dataclass(frozen=True)
class ByParity:
    """Even ids are on the first of two ranks, odd ones on the second, each under its own number."""

    ranks: tuple[int, int]

    def rank_of(self, ids: Tensor) -> Tensor:
        first, second = self.ranks
        return torch.where(ids % 2 == 0, first, second)

    def make_local(self, ids: Tensor, rank: int) -> None:
        """Every id keeps its number."""

    def boundaries(self, num_ranks: int) -> None:
        """Parities are no ranges."""


def test_a_range_partition() -> None:
    """Ranks 1, 2 and 4 hold ids 0 and 1, 2 and 3, and 4."""
    plan = place_table("t", SPEC, Placement.ROW_WISE, (1, 2, 4))
    partition = RangePartition.of(plan.shards)
    assert (partition.ranks, partition.first_ids) == ((1, 2, 4), (0, 2, 4, 5))
    ids = torch.tensor([0, 3, 4, 5, -1, 1])
    assert partition.rank_of(ids).tolist() == [1, 2, 4, -1, -1, 1]
    assert partition.boundaries(6) == [0, 0, 2, 4, 4, 5, 5]
    partition.make_local(ids, 2)
    assert ids.tolist() == [-2, 1, 2, 3, -3, -1]


def mixed_layout() -> Layout:
    """A slot by ranges, and one whose ids may be any."""
    (ranges,) = slot_parts(0, ROW_WISE)
    return Layout([ranges, SlotPart(1, ROW_WISE.shards, ByParity((0, 1)))], 2)


def test_a_layout_knows_where_partitions_are_no_ranges(device: torch.device) -> None:
    layout = mixed_layout()
    assert not layout.are_ranges
    assert layout.places(device).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert Layout(slot_parts(0, ROW_WISE), 2).are_ranges
    ids = [torch.tensor([0, 3, -1], device=device), torch.tensor([-1, LOW, 0], device=device)]
    is_valid = layout.make_local(ids, 1)
    assert is_valid is not None
    assert is_valid.tolist() == [False, True, False, True, False, False]
    assert [of_block.tolist() for of_block in ids] == [[-3, 0, -4], [-1, LOW, 0]]


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
    checked, first_bad = checked_ids(
        features,
        torch.tensor([5, 5], device=device),
        torch.tensor([False, True], device=device),
        OnBadId.RAISE,
        torch.int64,
    )
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
            route.exchange_sizes(ranks.group)
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
    """Of ``[0, 4, -1, 2]`` by ranges of 3 and 2 rows, where -1 is no id, and of
    ``[-1, LOW, HIGH, 0]`` by parity, where it is one; each twice, once from each rank."""
    first, second = run_on_ranks(2, on_a_rank, "")
    assert first["fixed"] == [[0, 2] * 2, [LOW, 0] * 2]
    assert second["fixed"] == [[1] * 2, [-1, HIGH] * 2]
    for way in ("announced", "padded"):
        # What is in no range goes to the first rank, as -1.
        assert first[way] == [[0, -1, 2] * 2, [LOW, 0] * 2]
        assert second[way] == [[1] * 2, [-1, HIGH] * 2]
