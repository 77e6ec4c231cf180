"""Promises of ``rowwise_update``, to the bit: order, sums, skipping, repeats, tracing."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.repeats import assert_repeats
from tests.support.row_updates import Training, positions, random_batch, scalar
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous
from torchembed.core.types import OptimizerKind
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = tuple(OptimizerKind)


def update_one_row(
    rule: UpdateRule,
    weight: Sequence[float],
    grad: Sequence[float],
    device: torch.device,
    **kw: Any,
) -> list[list[float]]:
    """One row, one gradient, lr 1/4, numbers that float32 holds exactly."""
    row = torch.tensor([weight], dtype=torch.float32, device=device)
    shape = rule.state_shape(*row.shape)
    states = tuple(torch.zeros(shape, device=device) for _ in range(rule.num_states))
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    gradients = RowGradients(torch.tensor([grad], dtype=torch.float32, device=device))
    runs = find_runs(rows, 1)
    rowwise_update(row, states, runs, gradients, rule, scalar(0.25, device), **kw)
    return [result.flatten().tolist() for result in (row, *states)]


def test_multiplies_then_clips_then_decays(device: torch.device) -> None:
    rule = UpdateRule(kind=OptimizerKind.SGD, weight_decay=0.5, max_gradient=1.0)
    half = scalar(0.5, device)
    # 8 / 2 = 4, clipped to 1, plus 2 / 2, times 1/4. And -1 / 2 is not clipped.
    assert update_one_row(rule, [2, 0], [8, -1], device, grad_multiplier=half) == [[1.5, 0.125]]
    assert update_one_row(rule, [0, 0], [-8, 8], device) == [[0.25, -0.25]]


def test_worked_examples_of_each_rule(device: torch.device) -> None:
    adagrad = UpdateRule(kind=OptimizerKind.ADAGRAD, eps=1.0)
    assert update_one_row(adagrad, [1, 1], [3, -1], device) == [[0.8125, 1.125], [9.0, 1.0]]
    # The mean of 0, 0, 0 and 64 is 16.
    rowwise = UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD, eps=1e-30)
    assert update_one_row(rowwise, [1, 1, 1, 1], [0, 0, 0, 8], device) == [[1, 1, 1, 0.5], [16.0]]
    # sqrt(1 - 3/4) / (1 - 1/2) = 1, m = 2, v = 4.
    adam = UpdateRule(kind=OptimizerKind.ADAM, eps=1e-30, beta1=0.5, beta2=0.75)
    assert update_one_row(adam, [1], [4], device, step=scalar(1, device)) == [[0.75], [2.0], [4.0]]


def test_adam_corrects_its_bias_at_every_step(device: torch.device) -> None:
    # With a gradient of 0 in the first step nothing moves, whatever the correction.
    rule = UpdateRule(kind=OptimizerKind.ADAM, eps=1e-30, beta1=0.5, beta2=0.75)
    for step in (1, 2, 10, 1_000_000):
        correction = (1 - 0.75**step) ** 0.5 / (1 - 0.5**step)
        ((weight,), *_) = update_one_row(rule, [0], [4], device, step=scalar(step, device))

        def formula(dtype: torch.dtype, correction: float = correction) -> Tensor:
            return torch.tensor([-0.25 * correction * 2 / 4**0.5], dtype=dtype)

        assert_follows(torch.tensor([weight]), formula)


@pytest.mark.parametrize("flag", [1.0, -2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_every_bit(
    kind: OptimizerKind,
    weight_dtype: torch.dtype,
    flag: float,
    device: torch.device,
    fastest_algorithms: None,
) -> None:
    rule = UpdateRule(kind=kind, weight_decay=0.1)
    weight = normal(5, 4, seed=0, dtype=weight_dtype, device=device)
    weight[1] = float("nan")
    weight[2] = -0.0
    shape = rule.state_shape(5, 4)
    states = tuple(torch.rand(shape, device=device) for _ in range(rule.num_states))
    before = [tensor.clone() for tensor in (weight, *states)]
    rows = torch.tensor([0, 1, 2, 2, -1], device=device)
    grad = torch.full((5, 4), float("nan"), device=device)
    arguments = (find_runs(rows, 5), RowGradients(grad), rule, scalar(0.1, device))
    step = scalar(1, device)
    rowwise_update(weight, states, *arguments, step=step, skip=scalar(flag, device))
    for tensor, expected in zip((weight, *states), before, strict=True):
        assert_same_bits(tensor, expected)

    rowwise_update(weight, states, *arguments, step=step, skip=scalar(0.0, device))
    assert torch.isnan(weight[:3]).all()
    assert_same_bits(weight[3:], before[0][3:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_stays_in_its_row(
    kind: OptimizerKind, device: torch.device
) -> None:
    rule = UpdateRule(kind=kind, max_gradient=1.0)
    training = Training(rule=rule, batches=[positions(0, 2, 2, 4)], num_rows=5, dim=3)
    clean = training.results(device)[0]
    training.batches[0].gradients.grad[1, 1] = float("nan")
    result = training.results(device)[0]
    assert torch.isnan(result[2, 1])
    assert_same_bits(result[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_a_run_is_summed_in_float32_and_in_order(
    weight_dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    # Zeros - (-1) * sum: the weight becomes the sum, rounded to nearest.
    num_rows, dim = 7, 12
    batch = random_batch(sizes.batch_size * 3, num_rows, dim, seed=0, scattered=True)
    gradients = RowGradients(batch.gradients.grad, batch.gradients.gradient_rows)
    weight = torch.zeros(num_rows, dim, dtype=weight_dtype, device=device)
    rowwise_update(
        weight,
        (),
        find_runs(batch.rows.to(device), num_rows),
        RowGradients(*(t if t is None else t.to(device) for t in gradients)),
        UpdateRule(kind=OptimizerKind.SGD),
        scalar(-1.0, device),
    )
    expected = torch.zeros(num_rows, dim)
    for row, gradient_row in zip(batch.rows.tolist(), gradients.gradient_rows, strict=True):
        if row >= 0:
            expected[row] += gradients.grad[gradient_row]
    assert torch.equal(weight.cpu(), expected.to(weight_dtype))


def test_layouts_and_integer_dtypes_change_nothing(device: torch.device, sizes: Sizes) -> None:
    num_rows, dim = sizes.num_rows, 16
    batch = random_batch(sizes.batch_size, num_rows, dim, seed=0, scattered=True)
    grad, gradient_rows, scales = (tensor.to(device) for tensor in batch.gradients)

    def update(rows: Tensor, *gradients: Tensor) -> list[Tensor]:
        weight = normal(num_rows, dim, seed=1, device=device)
        state = torch.zeros(num_rows, device=device)
        rule = UpdateRule(kind=OptimizerKind.ROWWISE_ADAGRAD)
        runs = find_runs(rows, num_rows)
        rowwise_update(weight, (state,), runs, RowGradients(*gradients), rule, scalar(0.1, device))
        return [weight, state]

    rows = batch.rows.to(device)
    expected = update(rows, grad, gradient_rows, scales)
    for result in (
        update(rows.int(), grad, gradient_rows.long(), scales),
        update(rows, *map(not_contiguous, (grad, gradient_rows, scales))),
    ):
        for tensor, same in zip(result, expected, strict=True):
            assert_same_bits(tensor, same)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_repeats_its_bits(
    weight_dtype: torch.dtype,
    kind: OptimizerKind,
    device: torch.device,
    sizes: Sizes,
    fastest_algorithms: None,
) -> None:
    batches = [random_batch(sizes.num_parallel_ids, sizes.num_rows, 32, 0, scattered=True)]
    training = Training(
        rule=UpdateRule(kind=kind, weight_decay=0.1),
        batches=batches,
        num_rows=sizes.num_rows,
        dim=32,
        weight_dtype=weight_dtype,
    )
    assert_repeats(lambda: training.results(device))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: OptimizerKind, device: torch.device) -> None:
    rule = UpdateRule(kind=kind)
    weight = normal(5, 4, seed=0, device=device)
    shape = rule.state_shape(5, 4)
    states = [torch.zeros(shape, device=device) for _ in range(rule.num_states)]
    states += [None] * (2 - len(states))
    runs = find_runs(torch.tensor([3, -1, 3, 0], device=device), 5)
    grad = normal(4, 4, seed=1, device=device)
    one = scalar(1.0, device)
    scalars = (scalar(0.1, device), one, one, scalar(0.0, device))
    gradient_rows = torch.tensor([3, 2, 1, 0], device=device, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.torchembed.rowwise_update.default,
        (
            *(weight, *states),
            *runs,
            *(grad, gradient_rows, torch.ones(4, device=device)),
            *scalars,
            *(None, None, None),
            *(int(kind), 1e-8, 0.9, 0.99, 0.1, 1.0),
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole_and_once_for_every_size(
    kind: OptimizerKind, device: torch.device, sizes: Sizes
) -> None:
    rule = UpdateRule(kind=kind)
    num_rows, dim = sizes.num_rows, 8

    def update(
        weight: Tensor, states: tuple[Tensor, ...], rows: Tensor, grad: Tensor, lr: Tensor
    ) -> None:
        runs = find_runs(rows, num_rows)
        rowwise_update(weight, states, runs, RowGradients(grad), rule, lr * 2, step=lr + 1)

    compiled = compiled_once(update)
    for num_ids in (11, 12, 19):
        batch = random_batch(num_ids, num_rows, dim, seed=num_ids)
        tables = []
        for function in (update, compiled):
            weight = normal(num_rows, dim, seed=0, device=device)
            shape = rule.state_shape(num_rows, dim)
            states = tuple(torch.zeros(shape, device=device) for _ in range(rule.num_states))
            grad = batch.gradients.grad.to(device)
            function(weight, states, batch.rows.to(device), grad, scalar(0.1, device))
            tables.append([weight, *states])
        for expected, result in zip(*tables, strict=True):
            assert_same_bits(result, expected)


def test_more_than_two_to_the_31_elements(device: torch.device, fastest_algorithms: None) -> None:
    # Pages that nothing touches take no memory on the CPU.
    dim = 64
    num_rows = 2**31 // dim + 3
    weight = torch.empty(num_rows, dim, dtype=torch.float16, device=device)
    rows = torch.tensor([num_rows - 1, 0, num_rows - 2, num_rows - 1], device=device)
    weight[rows] = 0.0
    grad = normal(4, dim, seed=0, device=device)
    rule = UpdateRule(kind=OptimizerKind.SGD)
    runs = find_runs(rows, num_rows)
    rowwise_update(weight, (), runs, RowGradients(grad), rule, scalar(-1.0, device))
    expected = torch.stack([grad[0] + grad[3], grad[1], grad[2]]).half()
    assert_same_bits(weight[rows[:3]], expected)
