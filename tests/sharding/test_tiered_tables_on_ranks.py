"""Tables in host memory that several gloo ranks share."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case
from tests.support.stored_cases import MIXED, ROW_WISE, check_training_is_as_on_the_device
from torchembed.sharding.transport.global_rows import mesh_on

TABLE_WISE = dict.fromkeys("abcd", "table_wise")
CASES = [
    Case(placements=ROW_WISE, stored=("a", "b", "d")),
    Case(placements=ROW_WISE, stored=tuple("abcd"), optimizer="Adam", fixed=True),
    Case(placements=MIXED, stored=("a", "b", "d"), optimizer="RowwiseAdagrad"),
    Case(placements=MIXED, stored=("b",), planned=("d",), weighted=True, fixed=True),
    Case(placements=MIXED, stored=("a", "b", "d"), dtype=torch.bfloat16),
    Case(placements=MIXED, stored=("a",), planned=("b", "d"), pooled=False),
    Case(placements=ROW_WISE, stored=("a", "b"), pooled=False, fixed=True, optimizer="SGD"),
    Case(placements=ROW_WISE, stored=("a", "d"), dynamic=("b",), on_bad_id="zero"),
    Case(placements=ROW_WISE, planned=("a", "b"), dynamic=("b",)),
    # Only one of the ranks has something to fetch.
    Case(placements=TABLE_WISE, stored=("b",), on_bad_id="zero", fixed=True),
]


def _ranks_of_meshes() -> tuple[list[int], list[int], str]:
    mesh = init_device_mesh("cpu", (2,))
    other = mesh_on(mesh, "meta")
    return mesh.mesh.tolist(), other.mesh.tolist(), other.device_type


def test_a_mesh_for_another_device_has_the_same_ranks() -> None:
    assert run_on_ranks(2, _ranks_of_meshes) == [([0, 1], [0, 1], "meta")] * 2


def test_refuses_tables_that_every_rank_would_hold() -> None:
    case = Case(placements=dict.fromkeys("abcd", "data_parallel"), stored=("b",))
    with pytest.raises(
        ValueError,
        match=r"placement of table tables\.embedding_bags\.b must not be data_parallel, since its "
        "rows live outside the device",
    ):
        case.plan(2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_equals_unsharded_on_the_device(num_ranks: int) -> None:
    """Rows and states, bit for bit: pooled and sequences, jagged and fixed, weighted and means,
    beside static and dynamic tables on the device."""
    check_training_is_as_on_the_device(CASES, num_ranks)
