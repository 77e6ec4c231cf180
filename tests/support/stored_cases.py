"""Cases of sharded training whose tables are stored outside the device, and how they compare."""

import dataclasses
from collections.abc import Sequence

from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, assert_equal_training, train_sharded, train_unsharded

ROW_WISE = dict.fromkeys("abcd", "row_wise")
MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "d": "table_wise"}


def check_training_is_as_on_the_device(cases: Sequence[Case], num_ranks: int) -> None:
    """Rows and states of ``cases`` on ranks are those of one process with all tables on its device,
    bit for bit."""
    results = run_on_ranks(num_ranks, train_sharded, cases)
    for number, case in enumerate(cases):
        of_ranks = [rank_results[number] for rank_results in results]
        on_device = dataclasses.replace(case, stored=(), planned=())
        assert_equal_training(case, of_ranks, train_unsharded(on_device, num_ranks))
