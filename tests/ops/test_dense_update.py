"""``dense_update`` against its formulas and its reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.values import normal, not_contiguous
from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import DenseUpdate
from torchembed.ops.dense_update import DenseRule, dense_update
from torchembed.ops.dense_update.reference import dense_update_reference

KINDS = (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ADAM)
SIZES = (1, 1000, 1024, 2500)


def formula(rule: DenseRule, tensors: list[Tensor], lr: float, step: int) -> list[Tensor]:
    """Weight and states after a step, as torch.optim's documentation has it."""
    weight, grad, *states = tensors
    grad = grad + rule.weight_decay * weight
    if rule.kind is OptimizerKind.SGD:
        return [weight - lr * grad]
    if rule.kind is OptimizerKind.ADAGRAD:
        total = states[0] + grad**2
        return [weight - lr * grad / (total.sqrt() + rule.eps), total]
    mean = rule.beta1 * states[0] + (1 - rule.beta1) * grad
    square = rule.beta2 * states[1] + (1 - rule.beta2) * grad**2
    corrected = (square / (1 - rule.beta2**step)).sqrt() + rule.eps
    return [weight - lr * mean / (1 - rule.beta1**step) / corrected, mean, square]


def inputs(rule: DenseRule, size: int, device: torch.device, grad: torch.dtype) -> list[Tensor]:
    """Weight, gradient and states."""
    states = [normal(size, seed=2 + n, device=device).square() for n in range(rule.num_states)]
    return [
        normal(size, seed=0, device=device),
        normal(size, seed=1, dtype=grad, device=device),
        *states,
    ]


def update(tensors: list[Tensor], rule: DenseRule, lr: float, step: int, **settings: Any) -> None:
    weight, grad, *states = tensors
    scalar = torch.tensor([lr, step], device=weight.device, dtype=torch.float32)
    dense_update(weight, tuple(states), grad, rule, scalar[0], step=scalar[1], **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_follows_its_formula(
    kind: OptimizerKind, size: int, weight_decay: float, device: torch.device
) -> None:
    rule = DenseRule(kind=kind, weight_decay=weight_decay, eps=1e-3)
    tensors = inputs(rule, size, device, torch.float32)
    before = [tensor.cpu().clone() for tensor in tensors]
    update(tensors, rule, 0.1, 7)
    weight, _, *states = tensors
    for which, actual in enumerate((weight, *states)):
        assert_follows(
            actual,
            lambda dtype, which=which: formula(rule, [b.to(dtype) for b in before], 0.1, 7)[which],
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_has_the_bits_of_the_reference(
    kind: OptimizerKind, dtype: torch.dtype, device: torch.device
) -> None:
    rule = DenseRule(kind=kind, weight_decay=0.1)
    tensors = inputs(rule, 1500, device, dtype)
    rounded = torch.empty(1500, dtype=dtype, device=device)
    expected = [tensor.cpu().clone() for tensor in (*tensors, rounded)]
    multiplier = torch.full((1,), 0.125, device=device)
    update(tensors, rule, 0.1, 3, rounded=rounded, grad_multiplier=multiplier)
    weight, grad, *states, copy = expected
    dense_update_reference(
        DenseUpdate(
            weight,
            *(*states, None, None)[:2],
            copy,
            grad,
            torch.tensor(0.1),
            torch.tensor(3.0),
            multiplier.cpu(),
            None,
            [0, 1500],
            *(int(kind), rule.eps, rule.beta1, rule.beta2, rule.weight_decay),
        )
    )
    for actual, same in zip((*tensors, rounded), expected, strict=True):
        assert_same_bits(actual, same)
    assert_same_bits(rounded, tensors[0].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing(kind: OptimizerKind, device: torch.device) -> None:
    rule = DenseRule(kind=kind)
    tensors = inputs(rule, 40, device, torch.float32)
    tensors[1].fill_(torch.nan)
    rounded = normal(40, seed=9, dtype=torch.bfloat16, device=device)
    before = [tensor.clone() for tensor in (*tensors, rounded)]
    for skip in (1.0, 2.0):
        flag = torch.full((1,), skip, device=device)
        update(tensors, rule, 0.1, 1, rounded=rounded, skip=flag)
    for tensor, same in zip((*tensors, rounded), before, strict=True):
        assert_same_bits(tensor, same)
    tensors[1].fill_(1.0)
    update(tensors, rule, 0.1, 1, rounded=rounded, skip=torch.zeros(1, device=device))
    assert not torch.equal(tensors[0], before[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_parts", [1, 3, 20])
def test_parts_are_updated_alone(kind: OptimizerKind, num_parts: int, device: torch.device) -> None:
    rule = DenseRule(kind=kind)
    starts = [8 * number**2 * 11 for number in range(num_parts)]
    parts = [slice(start, start + 1 + 70 * number) for number, start in enumerate(starts)]
    parts.append(slice(starts[-1] + 2000, starts[-1] + 2000))  # of nothing
    tensors = inputs(rule, starts[-1] + 3000, device, torch.bfloat16)
    tensors.append(torch.zeros_like(tensors[1]))
    expected = [tensor.clone() for tensor in tensors]
    for part in parts:
        weight, grad, *states, rounded = (tensor[part] for tensor in expected)
        update([weight, grad, *states], rule, 0.1, 3, rounded=rounded)
    weight, grad, *states, rounded = tensors
    update([weight, grad, *states], rule, 0.1, 3, rounded=rounded, parts=parts)
    for tensor, same in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, same)


def test_no_parts_are_no_update(device: torch.device) -> None:
    weight, grad = torch.ones(2, 8, device=device)
    rule, lr = DenseRule(kind=OptimizerKind.SGD), torch.ones(1, device=device)
    dense_update(weight, (), grad, rule, lr, parts=[])
    assert weight.tolist() == [1.0] * 8


def test_worked_example(device: torch.device) -> None:
    weight, grad = torch.tensor([[10.0], [3.0]], device=device)
    dense_update(weight, (), grad, DenseRule(kind=OptimizerKind.SGD), torch.tensor(2.0).to(device))
    assert weight.tolist() == [4.0]


def test_nothing_to_update(device: torch.device) -> None:
    empty = torch.empty(0, device=device)
    dense_update(empty, (), empty, DenseRule(kind=OptimizerKind.SGD), torch.ones(1, device=device))


def test_a_gradient_need_not_be_contiguous(device: torch.device) -> None:
    rule = DenseRule(kind=OptimizerKind.ADAGRAD)
    tensors = inputs(rule, 50, device, torch.float32)
    strided = [tensor.clone() for tensor in tensors]
    strided[1] = not_contiguous(strided[1])
    update(tensors, rule, 0.1, 1)
    update(strided, rule, 0.1, 1)
    assert_same_bits(strided[0], tensors[0])


def test_opcheck(device: torch.device) -> None:
    rule = DenseRule(kind=OptimizerKind.ADAM)
    weight, grad, mean, square = inputs(rule, 9, device, torch.bfloat16)
    one = torch.ones(1, device=device)
    arguments = (weight, mean, square, grad.clone(), grad, one, one, one, None, [0, 3, 8, 9], 3)
    torch.library.opcheck(
        torch.ops.torchembed.dense_update.default, (*arguments, 1e-8, 0.9, 0.99, 0.0)
    )


def test_the_lane_runs_its_kernels(device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    expected = "reference" if lane == "native" else lane
    assert lanes.picked_kernel("dense_update", device) == expected


def test_bad_arguments_are_named(device: torch.device) -> None:
    rule = DenseRule(kind=OptimizerKind.ADAGRAD)
    weight, grad, state = inputs(rule, 9, device, torch.float32)
    lr = torch.ones(1, device=device)
    with pytest.raises(TypeError, match="weight must be float32, got bfloat16; keep 16-bit"):
        dense_update(weight.bfloat16(), (state,), grad, rule, lr)
    with pytest.raises(ValueError, match=r"states must be 1 tensor\(s\), got 0"):
        dense_update(weight, (), grad, rule, lr)
    with pytest.raises(TypeError, match="state0 must be float32, got float16"):
        dense_update(weight, (state.half(),), grad, rule, lr)
    with pytest.raises(ValueError, match=r"grad must hold 9 elements .*, got 8"):
        dense_update(weight, (state,), grad[:8], rule, lr)
    with pytest.raises(ValueError, match=r"state0 must have 1 dimension\(s\), got shape \(3, 3\)"):
        dense_update(weight, (state.view(3, 3),), grad, rule, lr)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        dense_update(not_contiguous(weight), (state,), grad, rule, lr)
    with pytest.raises(TypeError, match="rounded must be float16 or bfloat16, got float32"):
        dense_update(weight, (state,), grad, rule, lr, rounded=weight.clone())
    with pytest.raises(TypeError, match="lr must be float32, got float64"):
        dense_update(weight, (state,), grad, rule, lr.double())
    with pytest.raises(
        ValueError, match=r"skip must hold 1 elements \(a scalar in a tensor\), got 9"
    ):
        dense_update(weight, (state,), grad, rule, lr, skip=weight)
    with pytest.raises(ValueError, match=r"grad must be on .* as weight is, got meta"):
        dense_update(weight, (state,), grad.to("meta"), rule, lr)
    for part in (slice(4, 8), slice(0, 10), slice(8, 7)):
        with pytest.raises(ValueError, match=rf"parts must .* got \[{part.start}, {part.stop}\)"):
            dense_update(weight, (state,), grad, rule, lr, parts=[part])
    with pytest.raises(ValueError, match="step must be given for ADAM, got None"):
        dense_update(weight, (state, state), grad, DenseRule(kind=OptimizerKind.ADAM), lr)
    with pytest.raises(ValueError, match="kind must be SGD, ADAGRAD or ADAM, got ROWWISE_ADAGRAD"):
        DenseRule(kind=OptimizerKind.ROWWISE_ADAGRAD)
