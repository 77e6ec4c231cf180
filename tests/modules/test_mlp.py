"""``MLP`` against torch's layers and TorchRec's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.values import normal
from torchembed.modules.dense.mlp import MLP


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def kinds(mlp: MLP) -> list[str]:
    return [type(layer).__name__.removeprefix("_") for layer in mlp]


def test_each_layer_is_linear_normalized_activated_and_thinned() -> None:
    mlp = MLP(5, [4, 3], batch_norm=True, dropout=0.25, activation=nn.Sigmoid)
    assert kinds(mlp) == ["Linear", "BatchNorm", "Sigmoid", "Dropout"] * 2
    assert [tuple(layer.weight.shape) for layer in linear_layers(mlp)] == [(4, 5), (3, 4)]
    assert mlp[3].p == 0.25
    assert mlp[2] is not mlp[6]


def test_the_last_layer_may_be_linear() -> None:
    mlp = MLP(5, [4, 1], batch_norm=True, dropout=0.25, activation_on_last=False)
    assert kinds(mlp) == ["Linear", "BatchNorm", "ReLU", "Dropout", "Linear"]
    assert kinds(MLP(5, [1], activation_on_last=False)) == ["Linear"]


def test_what_is_not_asked_for_is_not_there() -> None:
    mlp = MLP(5, [4], bias=False)
    assert kinds(mlp) == ["Linear", "ReLU"]
    assert mlp[0].bias is None


def test_initial_values_are_those_of_dlrm() -> None:
    torch.manual_seed(0)
    layer = MLP(300, [500])[0]
    num_weights = layer.weight.numel()
    # A sample variance of n normal numbers has relative standard deviation sqrt(2 / n).
    for values, variance in ((layer.weight, 2 / 800), (layer.bias, 1 / 500)):
        spread = 5 * math.sqrt(2 / values.numel())
        assert values.var().item() == pytest.approx(variance, rel=spread)
        assert abs(values.mean().item()) < 5 * math.sqrt(variance / values.numel())
    # Normal, not uniform: a kurtosis of 3, not 1.8.
    standard = layer.weight.flatten().double() / math.sqrt(2 / 800)
    kurtosis = standard.pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(96 / num_weights))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_equals_torchrecs(bias: bool, device: torch.device) -> None:
    torchrec_mlp = pytest.importorskip("torchrec.modules.mlp", reason="needs TorchRec")
    torch.manual_seed(0)
    ours = MLP(7, [6, 5, 3], bias=bias, device=device)
    x, grad = normal(9, 7, seed=1, device=device), normal(9, 3, seed=2, device=device)

    def theirs(dtype: torch.dtype) -> list[Tensor]:
        module = torchrec_mlp.MLP(7, [6, 5, 3], bias=bias, dtype=dtype, device=device)
        pairs = zip(linear_layers(module), linear_layers(ours), strict=True)
        for layer, same in pairs:
            layer.load_state_dict(same.state_dict())
        return with_gradients(module, x.to(dtype), grad.to(dtype))

    for which, result in enumerate(with_gradients(ours, x, grad)):
        assert_follows(result, lambda dtype, which=which: theirs(dtype)[which])


def with_gradients(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = module(x)
    return [output, *torch.autograd.grad(output, [x, *module.parameters()], grad)]


def test_batch_norm_is_torchs(device: torch.device) -> None:
    ours = MLP(6, [4], batch_norm=True, device=device)
    layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()).to(device)
    layers.load_state_dict(ours.state_dict())
    x = normal(8, 6, seed=1, device=device)
    for train in (True, False):
        ours.train(train)
        layers.train(train)
        assert_same_bits(ours(x), layers(x))
        assert_same_bits(ours[1].running_var, layers[1].running_var)


@pytest.mark.parametrize("batch_size", [0, 1])
def test_a_batch_without_variance_is_normalized_by_what_was_seen(
    batch_size: int, device: torch.device
) -> None:
    mlp = MLP(6, [4], batch_norm=True, device=device)
    mlp(normal(8, 6, seed=1, device=device))
    seen = {name: value.clone() for name, value in mlp[1].named_buffers()}
    x = normal(batch_size, 6, seed=2, device=device)
    output = mlp(x)
    output.sum().backward()
    for name, value in mlp[1].named_buffers():
        assert torch.equal(value, seen[name])
    assert_same_bits(output, mlp.eval()(x))


def test_dropout_stops_in_evaluation(device: torch.device) -> None:
    torch.manual_seed(0)
    mlp = MLP(6, [400], dropout=0.5, device=device)
    x = normal(3, 6, seed=1, device=device)
    full = mlp.eval()(x)
    thinned = mlp.train()(x)
    kept = thinned != 0
    assert 0.3 < (kept.sum() / (full != 0).sum()).item() < 0.7
    assert_same_bits(thinned[kept], 2 * full[kept])


def operations(output: Tensor) -> list[str]:
    """Torchembed's that made ``output``, from the last one."""
    found: list[str] = []
    node = output.grad_fn
    while node is not None:
        if "Linear" in node.name():
            found.append(node.name().strip("_").removesuffix("Backward"))
        # The first is the input, where there is one.
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["LinearReluStack"]),
        ({"activation_on_last": False}, ["Linear", "LinearReluStack"]),
        ({"dropout": 0.5}, ["LinearReluStack"] * 3),
        ({"activation": nn.Sigmoid}, ["Linear"] * 3),
        ({"batch_norm": True}, ["Linear"] * 3),
        ({"bias": False}, ["Linear"] * 3),
    ],
    ids=str,
)
def test_rectified_layers_in_a_row_are_one_operation(
    arguments: dict[str, Any], expected: list[str], device: torch.device
) -> None:
    mlp = MLP(5, [4, 3, 2], device=device, **arguments)
    assert operations(mlp(normal(4, 5, seed=1, device=device))) == expected


def test_hooks_and_shared_layers_part_a_row(device: torch.device) -> None:
    mlp, x = MLP(5, [4, 4, 4, 4], device=device), normal(3, 5, seed=1, device=device)
    whole = with_gradients(mlp, x, torch.ones(3, 4, device=device))
    shapes: list[torch.Size] = []
    hook = mlp[3].register_forward_hook(lambda *args: shapes.append(args[-1].shape))
    parted = with_gradients(mlp, x, torch.ones(3, 4, device=device))
    assert operations(parted[0]) == ["LinearReluStack", "Linear", "LinearReluStack"]
    assert shapes == [(3, 4)]
    for actual, same in zip(parted, whole, strict=True):
        assert_same_bits(actual, same)
    hook.remove()
    assert operations(mlp(x)) == ["LinearReluStack"]
    mlp[4].weight = mlp[2].weight
    assert operations(mlp(x)) == ["LinearReluStack"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_made_where_and_as_asked(dtype: torch.dtype) -> None:
    mlp = MLP(6, [4, 3], batch_norm=True, device="meta", dtype=dtype)
    for parameter in mlp.parameters():
        assert parameter.is_meta and parameter.dtype == dtype


def test_no_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"^layer_sizes must hold one width or more, got none$"):
        MLP(6, [])


@pytest.mark.parametrize(("width", "sizes"), [(0, [3]), (6, [3, 0])])
def test_widths_below_one_are_an_error(width: int, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"must be at least 1, got {width} and \{sizes}$"):
        MLP(width, sizes)
