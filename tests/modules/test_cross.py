"""``LowRankCross`` and ``Cross`` against TorchRec's cross networks and the paper's formula."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.tolerance import assert_follows
from tests.support.values import normal
from torchembed.modules.dense.cross import Cross, LowRankCross, VectorCross


def with_gradients(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = module(x)
    return [output, *torch.autograd.grad(output, [x, *module.parameters()], grad)]


def drawn(module: nn.Module) -> nn.Module:
    """``module`` with values that are always the same, and biases that matter."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            scale = 1 / parameter.shape[-1] if parameter.dim() == 2 else 1
            parameter.copy_(scale * normal(*parameter.shape, seed=index))
    return module


def check_against(
    ours: nn.Module,
    make: Callable[[torch.dtype], nn.Module],
    fill: Callable[[nn.Module], None],
    order: list[int],
    device: torch.device,
) -> None:
    """Output and gradients follow the module of ``make``, whose parameters come in ``order``."""
    x, grad = normal(9, 12, seed=1, device=device), normal(9, 12, seed=2, device=device)

    def theirs(dtype: torch.dtype, which: int) -> Tensor:
        module = make(dtype).to(device)
        with torch.no_grad():
            fill(module)
        results = with_gradients(module, x.to(dtype), grad.to(dtype))
        return results[which if which < 2 else 2 + order[which - 2]]

    for which, result in enumerate(with_gradients(ours, x, grad)):

        def formula(dtype: torch.dtype, which: int = which, shape: torch.Size = result.shape):
            return theirs(dtype, which).reshape(shape)

        assert_follows(result, formula)


def test_low_rank_equals_torchrecs(device: torch.device) -> None:
    crossnet = pytest.importorskip("torchrec.modules.crossnet", reason="needs TorchRec")
    ours = drawn(LowRankCross(12, 3, 4, device=device))

    def fill(module: nn.Module) -> None:
        for layer in range(3):
            module.V_kernels[layer].copy_(ours.v[layer])
            module.W_kernels[layer].copy_(ours.u[layer])
            module.bias[layer].copy_(ours.bias[layer])

    # Ours are v, u, bias; theirs W, V, bias.
    order = [3, 4, 5, 0, 1, 2, 6, 7, 8]
    check_against(
        ours, lambda dtype: crossnet.LowRankCrossNet(12, 3, 4).to(dtype), fill, order, device
    )


def test_full_rank_equals_torchrecs(device: torch.device) -> None:
    crossnet = pytest.importorskip("torchrec.modules.crossnet", reason="needs TorchRec")
    ours = drawn(Cross(12, 3, device=device))

    def fill(module: nn.Module) -> None:
        for layer in range(3):
            module.kernels[layer].copy_(ours.weight[layer])
            module.bias[layer].copy_(ours.bias[layer].unsqueeze(1))

    order = list(range(6))
    check_against(ours, lambda dtype: crossnet.CrossNet(12, 3).to(dtype), fill, order, device)


def test_the_paper_by_hand(device: torch.device) -> None:
    ours = LowRankCross(2, 2, 1, device=device)
    with torch.no_grad():
        for layer in range(2):
            ours.v[layer].copy_(torch.tensor([[1.0, 2.0]]))
            ours.u[layer].copy_(torch.tensor([[3.0], [-1.0]]))
            ours.bias[layer].copy_(torch.tensor([1.0, 0.0]))
    # v x0 = 5: x1 = (1 * 16 + 1, 2 * -5 + 2) = (17, -8); v x1 = 1: x2 = (1 * 4 + 17, 2 * -1 - 8).
    assert ours(torch.tensor([[1.0, 2.0]], device=device)).tolist() == [[21.0, -10.0]]


def test_no_layers_change_nothing(device: torch.device) -> None:
    x = normal(3, 5, seed=0, device=device)
    assert torch.equal(LowRankCross(5, 0, 2, device=device)(x), x)
    assert torch.equal(Cross(5, 0, device=device)(x), x)


def test_initial_values() -> None:
    torch.manual_seed(0)
    low_rank, full = LowRankCross(300, 1, 200), Cross(300, 1)
    for values, variance in (
        (low_rank.v[0], 2 / 500),
        (low_rank.u[0], 2 / 500),
        (full.weight[0], 2 / 600),
    ):
        spread = 5 * math.sqrt(2 / values.numel())
        assert values.var().item() == pytest.approx(variance, rel=spread)
    assert not low_rank.bias[0].any() and not full.bias[0].any()


def test_made_on_no_device_first(device: torch.device) -> None:
    with torch.device("meta"):
        modules = [LowRankCross(6, 2, 3), Cross(6, 2)]
    for module in modules:
        assert all(parameter.is_meta for parameter in module.parameters())
        module.to_empty(device=device)
        module.reset_parameters()
        assert torch.isfinite(module(normal(3, 6, seed=0, device=device))).all()


def test_trains_under_autocast(device: torch.device) -> None:
    low_rank, full = LowRankCross(16, 2, 4, device=device), Cross(16, 2, device=device)
    x = normal(5, 16, seed=0, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outputs = [low_rank(x), full(x)]
    # A full-rank layer adds the rounded product to x as it is.
    assert [output.dtype for output in outputs] == [torch.bfloat16, torch.float32]
    for output in outputs:
        output.sum().backward()
    for parameter in (*low_rank.parameters(), *full.parameters()):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


def test_a_rank_below_one_and_layers_below_zero_are_errors() -> None:
    with pytest.raises(ValueError, match=r"^low_rank must be 1 or more, got 0$"):
        LowRankCross(6, 1, 0)
    for make in (Cross, VectorCross, lambda width, layers: LowRankCross(width, layers, 2)):
        with pytest.raises(ValueError, match=r"^num_layers must not be negative, got -1$"):
            make(6, -1)
