"""Row-wise Adagrad in two steps, with sums over ranks between, is row-wise Adagrad."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.support.row_updates import scalar
from tests.support.tolerance import assert_same_bits
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.optim.divided_columns import update_divided_columns
from torchembed.tables import Constant, Table, TableSet, TableSpec

ROWS = (3, 0, 3, -1, 5, 0, 3)
RULES = {
    "plain": UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD),
    "clamped": UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD, max_gradient=2.0),
    "decaying": UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD, weight_decay=0.5, eps=0.25),
}


def made_table(dtype: torch.dtype, rule: UpdateRule, device: torch.device) -> Table:
    """A table of 7 rows with exact numbers, whose columns are on no other rank."""
    spec = TableSpec(
        name="t", num_rows=7, dim=12, dtype=dtype, initializer=Constant(value=0.5), seed=3
    )
    table = Table(spec)
    TableSet([table], [None], device)
    table.group.set_rule(rule, 0.25)
    table.group.step.fill_(4.0)
    return table


@pytest.mark.parametrize("num_copies", [1, 10])
@pytest.mark.parametrize("skipped", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_has_the_bits_of_one_update(
    name: str, dtype: torch.dtype, skipped: float | None, num_copies: int, device: torch.device
) -> None:
    rule, rows = RULES[name], torch.tensor(ROWS * num_copies, device=device)
    # Integers: the sums over a row are exact in any order.
    grad = (torch.arange(len(rows) * 12) * 5 % 11 - 5).float().view(-1, 12).to(device)
    gradients = RowGradients(grad, scales=torch.full((len(rows),), 2.0, device=device))
    multiplier = scalar(0.5, device)
    skip = None if skipped is None else scalar(skipped, device)
    divided, whole = (made_table(dtype, rule, device) for _ in range(2))
    runs = find_runs(rows, 7)
    rounds = dtype != torch.float32

    def of_smallest_rank(squares: Tensor) -> Tensor:
        """The sum over one rank, beside others with room for few spare runs only."""
        return squares[: 4 * num_copies]

    divided.sum_over_columns = of_smallest_rank
    update_divided_columns(
        divided,
        runs,
        gradients,
        rule,
        scalar(0.1, device),
        grad_multiplier=multiplier,
        skip=skip,
        stochastic=rounds,
    )
    rowwise_update(
        whole.group.weight,
        whole.group.states,
        runs,
        gradients,
        rule,
        scalar(0.1, device),
        step=whole.group.step,
        grad_multiplier=multiplier,
        skip=skip,
        rounding=whole.group.rounding_keys if rounds else None,
    )
    assert_same_bits(divided.group.states[0], whole.group.states[0])
    assert_same_bits(divided.group.weight, whole.group.weight)
    touched = (divided.group.weight != 0.5).any(dim=1).nonzero().flatten().tolist()
    assert touched == ([] if skipped else [0, 3, 5])


def test_only_the_table_s_own_columns_count_for_the_mean(device: torch.device) -> None:
    """Squares of 12 in half of the columns and 12 elsewhere: (12 + 12) / 12 on top of 1/4."""
    rule = RULES["plain"]
    spec = TableSpec(name="t", num_rows=2, dim=12)
    half = Table(spec, first_column=6)
    TableSet([half], [None], device)
    half.group.set_rule(rule, 0.25)
    half.sum_over_columns = lambda squares: squares + 12.0
    update_divided_columns(
        half,
        find_runs(torch.tensor([1], device=device), 2),
        RowGradients(torch.tensor([[1.0, 1.0, -1.0, 1.0, 2.0, -2.0]], device=device)),
        dataclasses.replace(rule),
        scalar(0.1, device),
        grad_multiplier=None,
        skip=None,
        stochastic=False,
    )
    assert half.group.states[0].tolist() == [0.25, 2.25]
