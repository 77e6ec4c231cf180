"""Tables in host memory that several gloo ranks share."""

import dataclasses

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import (
    Case,
    assert_equal_training,
    train_sharded,
    train_unsharded,
)

ROW_WISE = dict.fromkeys("abcd", "row_wise")
MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}
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
]


def test_refuses_tables_that_every_rank_would_hold() -> None:
    case = Case(placements=dict.fromkeys("abcd", "data_parallel"), stored=("b",))
    with pytest.raises(
        ValueError,
        match=r"placement of table tables\.embedding_bags\.b must not be data_parallel, since its "
        "rows live in host memory",
    ):
        case.plan(2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_equals_unsharded_on_the_device(num_ranks: int) -> None:
    """Rows and states, bit for bit: pooled and sequences, jagged and fixed, weighted and means,
    beside static and dynamic tables on the device."""
    results = run_on_ranks(num_ranks, train_sharded, CASES)
    for number, case in enumerate(CASES):
        of_ranks = [rank_results[number] for rank_results in results]
        on_device = dataclasses.replace(case, stored=(), planned=())
        assert_equal_training(case, of_ranks, train_unsharded(on_device, num_ranks))
