"""``binary_cross_entropy`` against its formula and torch's."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support import lanes
from tests.support.repeats import assert_repeats
from tests.support.tolerance import assert_follows, relative_error
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous
from torchembed.ops.binary_cross_entropy import binary_cross_entropy

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def logits_and_labels(
    *shape: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    logits = 4 * normal(*shape, seed=0, device=device)
    labels = (normal(*shape, seed=1, device=device) > 0).float()
    return logits.to(dtype), labels


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = binary_cross_entropy(leaf, labels)
    return loss, torch.autograd.grad(3 * loss, leaf)[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (1000,), (20, 1), (9000,)], ids=str)
def test_follows_its_formula(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels = logits_and_labels(*shape, dtype=dtype, device=device)
    loss, grad = loss_and_gradient(logits, labels)
    assert loss.dtype == torch.float32 and grad.dtype == dtype

    def formula(dtype: torch.dtype, which: int) -> Tensor:
        leaf = logits.cpu().to(dtype).requires_grad_()
        exact = F.binary_cross_entropy_with_logits(leaf, labels.cpu().to(dtype))
        return (exact, torch.autograd.grad(3 * exact, leaf)[0])[which]

    assert_follows(loss, lambda dtype: formula(dtype, 0))
    assert_follows(grad, lambda dtype: formula(dtype, 1))


@pytest.mark.parametrize(
    ("logit", "label", "loss", "slope"),
    [
        (1000.0, 1.0, 0.0, 0.0),
        (1000.0, 0.0, 1000.0, 1.0),
        (-1000.0, 0.0, 0.0, 0.0),
        (-1000.0, 1.0, 1000.0, -1.0),
        (-20.0, 0.0, math.log1p(math.exp(-20)), math.exp(-20) / (1 + math.exp(-20))),
        (0.0, 0.25, math.log(2), 0.25),
    ],
)
def test_neither_overflows_nor_cancels(
    logit: float, label: float, loss: float, slope: float, device: torch.device
) -> None:
    leaf = torch.tensor([logit], device=device, requires_grad=True)
    found = binary_cross_entropy(leaf, torch.tensor([label], device=device))
    (grad,) = torch.autograd.grad(found, leaf)
    # Four roundings: of the exponential, its sum or logarithm, the quotient, and the difference.
    assert found.item() == pytest.approx(loss, rel=relative_error(4), abs=0)
    assert grad.item() == pytest.approx(slope, rel=relative_error(4), abs=0)


def test_worked_example(device: torch.device) -> None:
    labels = torch.tensor([0.0, 1.0], device=device)
    leaf = torch.zeros(2, device=device, requires_grad=True)
    loss = binary_cross_entropy(leaf, labels)
    loss.backward()
    # The logarithm is rounded; the mean of two equal numbers is exact.
    assert loss.item() == pytest.approx(math.log(2), rel=relative_error(1), abs=0)
    assert leaf.grad is not None and leaf.grad.tolist() == [0.25, -0.25]


def test_what_is_not_finite_shows(device: torch.device) -> None:
    labels = torch.ones(3, device=device)
    for bad in (torch.nan, -torch.inf):
        logits = torch.tensor([0.0, bad, 1.0], device=device)
        assert not torch.isfinite(binary_cross_entropy(logits, labels))
    empty = torch.empty(0, device=device, requires_grad=True)
    loss = binary_cross_entropy(empty, empty.detach())
    assert torch.isnan(loss)
    loss.backward()
    assert empty.grad is not None and empty.grad.shape == (0,)


def test_inputs_need_not_be_contiguous(device: torch.device) -> None:
    logits, labels = logits_and_labels(30, dtype=torch.float32, device=device)
    expected = loss_and_gradient(logits, labels)
    strided = loss_and_gradient(not_contiguous(logits), not_contiguous(labels))
    for actual, same in zip(strided, expected, strict=True):
        assert torch.equal(actual, same)


def test_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    logits, labels = logits_and_labels(9000, dtype=torch.bfloat16, device=device)
    assert_repeats(lambda: loss_and_gradient(logits, labels))


def test_opcheck(device: torch.device) -> None:
    logits, labels = logits_and_labels(7, dtype=torch.bfloat16, device=device)
    ops = torch.ops.torchembed
    torch.library.opcheck(ops.binary_cross_entropy_forward.default, (logits, labels))
    one = torch.ones((), device=device)
    torch.library.opcheck(ops.binary_cross_entropy_backward.default, (one, logits, labels))


def test_compiles_whole_for_any_batch_size(device: torch.device) -> None:
    compiled = compiled_once(binary_cross_entropy)
    for size in (4, 7):
        logits, labels = logits_and_labels(size, dtype=torch.float32, device=device)
        logits.requires_grad_()
        assert torch.equal(compiled(logits, labels), binary_cross_entropy(logits, labels))


def test_bad_arguments_are_named(device: torch.device) -> None:
    logits, labels = logits_and_labels(4, dtype=torch.float32, device=device)
    with pytest.raises(
        ValueError, match=r"labels must have the shape of logits, \(4,\), got \(4, 1"
    ):
        binary_cross_entropy(logits, labels.unsqueeze(1))
    with pytest.raises(TypeError, match=r"labels must be float32 or .*, got int64; call .float"):
        binary_cross_entropy(logits, labels.long())
    with pytest.raises(ValueError, match=r"labels must be on .* as logits is, got meta"):
        binary_cross_entropy(logits, labels.to("meta"))


@pytest.mark.parametrize("op", ["binary_cross_entropy_forward", "binary_cross_entropy_backward"])
def test_the_lane_runs_its_kernels(op: str, device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    assert lanes.picked_kernel(op, device) == ("reference" if lane == "native" else lane)
