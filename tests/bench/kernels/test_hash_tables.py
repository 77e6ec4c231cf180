"""The benchmark of hash tables, on a small table of the CPU."""

import pytest
import torch

from bench.kernels.hash_tables import (
    HIT_RATE,
    HITS,
    OPERATIONS,
    Hits,
    MeasuredTable,
    Setting,
    main,
    measure,
)
from tests.support.hash_tables import copy_of
from tests.support.tolerance import assert_same_bits

SETTING = Setting(num_rows=600, width=3, num_keys=100, device=torch.device("cpu"), num_calls=2)


@pytest.mark.parametrize("hits", HITS)
def test_measures_from_the_same_table(hits: Hits) -> None:
    table = MeasuredTable(SETTING)
    table.fill(0.5)
    assert 0.5 <= table.load < 0.7
    before, keys = copy_of(table.held), table.batch(hits, seed=1)
    assert int((table.find(keys) >= 0).sum()) == 100 * HIT_RATE
    rates = measure(table, hits)
    assert list(rates) == list(OPERATIONS) and min(rates.values()) > 0
    for tensor, expected in zip(table.held, before, strict=True):
        if tensor is not None and expected is not None:
            assert_same_bits(tensor, expected)


def test_rows_that_are_wrong_give_no_figure() -> None:
    table = MeasuredTable(SETTING)
    table.fill(0.5)
    table.weight[table.find(table.batch("last", seed=1)).amax()] += 1
    with pytest.raises(RuntimeError, match="other rows than those of the keys"):
        measure(table, "last")


def test_prints_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["--widths", "2", "4", "--rows", "2**9", "--keys", "64", "--calls", "1", "--device", "cpu"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 3 * len(HITS)
    assert lines[-1].split()[0] == "4" and "1.00" in lines[-1]
