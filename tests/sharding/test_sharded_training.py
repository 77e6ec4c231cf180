"""A sharded model trains as the unsharded one, on 1, 2, 4 and 8 gloo ranks."""

import dataclasses
import itertools

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, assert_equal_training, train_sharded, train_unsharded

# Each placement is in one of the two, beside others.
MIXED = {"a": "column_wise", "b": "row_wise", "c": "table_row_wise", "d": "data_parallel"}
MIXED_TOO = {"a": "table_wise", "b": "table_row_wise", "c": "column_wise", "d": "row_wise"}
OPTIMIZERS = ("SGD", "Adagrad", "RowwiseAdagrad", "Adam")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MATRIX = [
    Case(placements=placements, pooled=pooled, optimizer=optimizer, dtype=dtype, fixed=number % 2)
    for number, (optimizer, dtype, pooled, placements) in enumerate(
        itertools.product(OPTIMIZERS, DTYPES, (True, False), (MIXED, MIXED_TOO))
    )
]
ALIKE = [
    Case(placements=dict.fromkeys("abcd", placement), pooled=pooled, fixed=fixed)
    for placement in (
        "table_wise",
        "row_wise",
        "data_parallel",
        "column_wise",
        "table_row_wise",
    )
    for pooled, fixed in ((True, False), (True, True), (False, False))
]
OTHERS = [
    *(Case(placements=MIXED, weighted=True, fixed=f, reserved=8 * f) for f in (False, True)),
    *(Case(placements=MIXED, fused=False, optimizer=name) for name in ("SGD", "Adagrad")),
    Case(placements=MIXED, pooled=False, fused=False, optimizer="SGD"),
    *(
        Case(placements=MIXED, on_bad_id=mode, fixed=fixed, pooled=pooled)
        for mode in ("zero", "clamp")
        for fixed, pooled in ((False, True), (True, True), (False, False))
    ),
]
SOME = [
    Case(placements=placements, pooled=pooled, optimizer=optimizer, dtype=dtype)
    for placements in (MIXED, MIXED_TOO)
    for pooled, optimizer, dtype in (
        (True, "RowwiseAdagrad", torch.bfloat16),
        (False, "Adam", torch.float32),
    )
]
ON_SOME_RANKS = [
    Case(placements=MIXED, pooled=pooled, optimizer="RowwiseAdagrad", column_ranks=(1, 2))
    for pooled in (True, False)
]


def on_two_nodes(cases: list[Case]) -> list[Case]:
    return [dataclasses.replace(case, num_nodes=2) for case in cases]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (1, SOME),
        (2, [*ALIKE, *OTHERS]),
        (4, [*on_two_nodes(MATRIX), *SOME, *ON_SOME_RANKS]),
        (8, [*on_two_nodes(SOME), *SOME[:1]]),
    ],
    ids=["1", "2", "4", "8"],
)
def test_sharded_equals_unsharded(num_ranks: int, cases: list[Case]) -> None:
    results = run_on_ranks(num_ranks, train_sharded, cases)
    for number, case in enumerate(cases):
        of_ranks = [rank_results[number] for rank_results in results]
        assert_equal_training(case, of_ranks, train_unsharded(case, num_ranks))
