"""A sharded model trains as the unsharded one, on 1, 2 and 4 gloo ranks."""

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.sharding.cases import Case, assert_equal_training, train_sharded, train_unsharded

MIXED = {"a": "table_wise", "b": "row_wise", "c": "row_wise", "d": "data_parallel"}
EVERYWHERE = {
    placement: dict.fromkeys("abcd", placement)
    for placement in ("table_wise", "row_wise", "data_parallel")
}
CASES = [
    *(
        Case(placements=MIXED, optimizer=optimizer, fixed=fixed)
        for optimizer in ("SGD", "Adagrad", "RowwiseAdagrad", "Adam")
        for fixed in (False, True)
    ),
    *(
        Case(placements=placements, fixed=fixed)
        for placements in EVERYWHERE.values()
        for fixed in (False, True)
    ),
    *(Case(placements=MIXED, weighted=True, fixed=fixed) for fixed in (False, True)),
    *(Case(placements=MIXED, fused=False, optimizer=name) for name in ("SGD", "Adagrad")),
    *(Case(placements=placements, pooled=False) for placements in (MIXED, *EVERYWHERE.values())),
    Case(placements=MIXED, pooled=False, optimizer="Adam", fixed=True),
    Case(placements=MIXED, pooled=False, fused=False, optimizer="SGD"),
    *(
        Case(placements=MIXED, on_bad_id=mode, fixed=fixed, pooled=pooled)
        for mode in ("zero", "clamp")
        for fixed, pooled in ((False, True), (True, True), (False, False))
    ),
    Case(placements=MIXED, dtype=torch.bfloat16, optimizer="SGD"),
    Case(placements=MIXED, dtype=torch.float16, optimizer="Adagrad"),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sharded_equals_unsharded(num_ranks: int) -> None:
    results = run_on_ranks(num_ranks, train_sharded, CASES)
    for number, case in enumerate(CASES):
        of_ranks = [rank_results[number] for rank_results in results]
        assert_equal_training(case, of_ranks, train_unsharded(case, num_ranks))
