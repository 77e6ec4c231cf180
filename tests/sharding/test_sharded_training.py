"""A sharded model trains as the unsharded one, on 1, 2, 4 and 8 gloo ranks."""

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, assert_equal_training, train_sharded, train_unsharded
from tests.support.sharding_matrix import ALIKE, MATRIX, ON_SOME_RANKS, OTHERS, SOME, on_two_nodes


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
