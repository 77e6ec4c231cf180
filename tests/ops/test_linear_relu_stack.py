"""``linear_relu_stack`` against torch's layers and against its own layers one by one."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.repeats import assert_repeats
from tests.support.tolerance import assert_as_near, assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous, whole
from torchembed.autograd.gradient_slots import slot_of
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.ops.linear import linear_relu, linear_relu_stack
from torchembed.optim import DenseSGD

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (13, 40, 7, 21, 5)
SIZES = [(1, 129), (4, 129), *((2, num_rows) for num_rows in (0, 1, 127, 128, 129, 1025))]
"""Numbers of layers and rows."""


def stack(x: Tensor, *parameters: Tensor) -> Tensor:
    """The stack as a function of all weights and then all biases."""
    count = len(parameters) // 2
    return linear_relu_stack(x, parameters[:count], parameters[count:])


def one_by_one(x: Tensor, *parameters: Tensor) -> Tensor:
    count = len(parameters) // 2
    for weight, bias in zip(parameters[:count], parameters[count:], strict=True):
        x = linear_relu(x, weight, bias)
    return x


def formula(x: Tensor, *parameters: Tensor) -> Tensor:
    """Biases may be one, or one for each row."""
    count = len(parameters) // 2
    for weight, bias in zip(parameters[:count], parameters[count:], strict=True):
        x = F.relu(F.linear(x, weight) + bias if bias.dim() == 2 else F.linear(x, weight, bias))
    return x


def inputs(
    num_layers: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """x, weights, biases and the gradient of the output."""
    return [
        normal(*size, seed=seed, dtype=dtype, device=device) / math.sqrt(size[-1])
        for seed, size in enumerate(sizes(num_layers, num_rows))
    ]


def whole_inputs(num_layers: int, num_rows: int, device: torch.device) -> list[Tensor]:
    """The same of whole numbers, whose results are whole numbers in any order of sums."""
    return [
        whole(*size, seed=seed, device=device)
        for seed, size in enumerate(sizes(num_layers, num_rows))
    ]


def sizes(num_layers: int, num_rows: int) -> list[tuple[int, ...]]:
    widths = WIDTHS[: num_layers + 1]
    of_weights = [(widths[layer + 1], widths[layer]) for layer in range(num_layers)]
    of_biases = [(width,) for width in widths[1:]]
    return [(num_rows, widths[0]), *of_weights, *of_biases, (num_rows, widths[-1])]


def results(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all but the last of ``tensors``, which is the output's."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:-1]]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, tensors[-1])]


def errors_of_sums(tensors: list[Tensor]) -> list[Tensor]:
    """How far float32 sums for each bias may be off, in any order."""
    num_layers, num_rows = (len(tensors) - 2) // 2, tensors[0].shape[0]
    # With a bias for each row, its gradient is what is summed.
    exact = [tensor.double() for tensor in tensors]
    exact[-1 - num_layers : -1] = [b.expand(num_rows, -1) for b in exact[-1 - num_layers : -1]]
    of_rows = results(formula, exact)[-num_layers:]
    return [num_rows * torch.finfo(torch.float32).eps * rows.abs().sum(0) for rows in of_rows]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_layers", "num_rows"), SIZES)
def test_follows_its_formula(
    num_layers: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    tensors = inputs(num_layers, num_rows, dtype, device)
    exact = results(formula, [tensor.double() for tensor in tensors])
    eager = results(formula, tensors)
    slack = [0.0] * (2 + num_layers) + [each.max().item() for each in errors_of_sums(tensors)]
    for actual, low, true, lost in zip(results(stack, tensors), eager, exact, slack, strict=True):
        assert actual.dtype == dtype
        assert_as_near(actual, low, true, slack=lost)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_layers", "num_rows"), SIZES)
def test_has_the_bits_of_its_layers(
    num_layers: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    if device.type == "cuda" and dtype is not torch.float32:
        pytest.skip("the C++ library's products round once, after the mask and the sums")
    tensors = inputs(num_layers, num_rows, dtype, device)
    expected = results(one_by_one, tensors)
    for actual, same in zip(results(stack, tensors), expected, strict=True):
        assert_same_bits(actual, same)


def test_two_layers_by_hand(device: torch.device) -> None:
    x, first, second = (
        torch.tensor(value, device=device)
        for value in ([[1.0, 2.0], [3.0, 0.0]], [[1.0, -1.0], [0.0, 2.0]], [[2.0, 3.0]])
    )
    biases = [torch.tensor(value, device=device) for value in ([0.0, 1.0], [-9.0])]
    # Rectified: [0, 5] and [3, 1]; then 15 - 9 = 6 and 9 - 9 = 0, which lets no gradient pass.
    found = results(stack, [x, first, second, *biases, torch.ones(2, 1, device=device)])
    expected = [
        [[6.0], [0.0]],
        [[0.0, 6.0], [0.0, 0.0]],
        [[0.0, 0.0], [3.0, 6.0]],
        [[0.0, 5.0]],
        [0.0, 3.0],
        [1.0],
    ]
    assert [tensor.tolist() for tensor in found] == expected


def test_any_layout(device: torch.device) -> None:
    *tensors, grad = whole_inputs(3, 8, device)
    expected = results(stack, [*tensors, grad])

    def strided(*leaves: Tensor) -> Tensor:
        x, *parameters = (not_contiguous(leaf) for leaf in leaves)
        return stack(x.view(2, 4, -1), *parameters).view(8, -1)

    for actual, same in zip(
        results(strided, [*tensors, not_contiguous(grad)]), expected, strict=True
    ):
        assert torch.equal(actual, same)
    x = tensors[0]
    assert linear_relu_stack(x, [], []) is x


def test_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    tensors = inputs(3, 300, torch.bfloat16, device)
    assert_repeats(lambda: results(stack, tensors))


class Calls(TorchDispatchMode):
    """Notes the names of the operations that make products and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("linear_relu_backward", "linear_relu_input_backward", "mm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_only_what_is_asked_for(device: torch.device) -> None:
    x, *parameters, _ = inputs(3, 4, torch.float32, device)
    sums, product = "linear_relu_backward", "linear_relu_input_backward"
    in_order = {
        "all": [sums, product, "mm", product, "mm", "mm", "mm"],
        "x": [sums, product, product, "mm"],
        "weights": [sums, product, "mm", product, "mm", "mm"],
        0: [sums, product, product, "mm"],
        1: [sums, product, "mm"],
        2: [sums, "mm"],
        3: [sums, product, product],
        4: [sums, product],
        5: [sums],
    }
    wanted_by = {"all": [x, *parameters], "x": [x], "weights": parameters[:3]}
    for name, expected in in_order.items():
        wanted = wanted_by[name] if isinstance(name, str) else [parameters[name]]
        for tensor in (x, *parameters):
            tensor.grad = None
            tensor.requires_grad_(any(tensor is other for other in wanted))
        output = stack(x, *parameters)
        with Calls() as calls:
            output.sum().backward()
        assert calls.names == expected, name
        for tensor in (x, *parameters):
            assert (tensor.grad is not None) == any(tensor is other for other in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 7, 129, 1025])
@pytest.mark.parametrize("is_flat", [False, True])
def test_deferred_gradients_are_the_same(
    is_flat: bool, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    tensors = inputs(3, num_rows, dtype, device)
    _, expected_x, *expected = results(stack, tensors)
    x, *parameters, grad = tensors
    x.requires_grad_()
    parameters = [torch.nn.Parameter(parameter) for parameter in parameters]
    if is_flat:
        DenseSGD(parameters)
    with DeferredWeightGradients():
        stack(x, *parameters).backward(grad)
        assert_same_bits(x.grad, expected_x)
        assert all(parameter.grad is None for parameter in parameters)
    lost = errors_of_sums(tensors)
    for position, (parameter, same) in enumerate(zip(parameters, expected, strict=True)):
        slot = slot_of(parameter)
        assert slot.holds(parameter.grad) if is_flat else slot is None
        if position < 3:
            assert_same_bits(parameter.grad, same)
            continue
        # Float32 sums in another order, rounded.
        allowed = torch.finfo(dtype).eps * same.double().abs() + 2 * lost[position - 3]
        assert ((parameter.grad.double() - same.double()).abs() <= allowed).all()


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
def test_gradients_of_a_shared_layer_are_added_up(
    is_flat: bool, is_deferred: bool, device: torch.device
) -> None:
    # Small integers, so that nothing is rounded.
    weight, bias, x, grad = (
        whole(*size, seed=seed, device=device)
        for seed, size in enumerate([(9, 9), (9,), (129, 9), (129, 9)])
    )

    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return formula(x, weight, weight, bias, bias)

    expected = results(twice, [x, weight, bias, grad])[2:]
    parameters = [torch.nn.Parameter(weight), torch.nn.Parameter(bias)]
    if is_flat:
        DenseSGD(parameters)
    weight, bias = parameters
    with DeferredWeightGradients() if is_deferred else contextlib.nullcontext():
        linear_relu_stack(x, [weight, weight], [bias, bias]).backward(grad)
    for parameter, same in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, same)


def test_under_autocast(device: torch.device) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs(2, 5, torch.float32, device)[:-1]]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output = stack(*leaves)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert {leaf.grad.dtype for leaf in leaves} == {torch.float32}


def test_compiles_whole_for_any_batch_size(device: torch.device) -> None:
    compiled = compiled_once(stack)
    for num_rows in (4, 7):
        tensors = whole_inputs(3, num_rows, device)
        expected = results(stack, tensors)
        for actual, same in zip(results(compiled, tensors), expected, strict=True):
            assert torch.equal(actual, same)


def test_bad_layers_are_named(device: torch.device) -> None:
    x, first, second, *biases, _ = inputs(2, 4, torch.float32, device)
    weights = [first, second]
    with pytest.raises(ValueError, match="weights and biases must hold one tensor a layer, got 2"):
        linear_relu_stack(x, weights, biases[:1])
    with pytest.raises(
        ValueError, match=r"x must be \[..., 13\] for a weights\[0\] of shape \(40, 13\), got"
    ):
        linear_relu_stack(x[:, :2], weights, biases)
    with pytest.raises(
        ValueError,
        match=r"weights\[1\] must have shape \[N, 40\] after weights\[0\] of 40 rows, got \(7, 3\)",
    ):
        linear_relu_stack(x, [first, second[:, :3]], biases)
    with pytest.raises(ValueError, match=r"weights\[1\] must have 2 dimension\(s\), got shape"):
        linear_relu_stack(x, [first, second[0]], biases)
    with pytest.raises(
        ValueError, match=r"biases\[1\] must hold 7 elements \(one for each row of weights\[1\]\)"
    ):
        linear_relu_stack(x, weights, [biases[0], biases[0]])
    with pytest.raises(TypeError, match=r"weights\[1\] must be float32, got bfloat16; cast one"):
        linear_relu_stack(x, [first, second.bfloat16()], [biases[0], biases[1].bfloat16()])
    with pytest.raises(TypeError, match=r"biases\[1\] must be float32, got bfloat16; cast one"):
        linear_relu_stack(x, weights, [biases[0], biases[1].bfloat16()])
    with pytest.raises(TypeError, match=r"weights\[0\] must be float32 or .*, got float64"):
        linear_relu_stack(x, [first.double(), second], biases)
    with pytest.raises(TypeError, match="x must be float32, got bfloat16; cast one of them"):
        linear_relu_stack(x.bfloat16(), weights, biases)
    with pytest.raises(ValueError, match=r"weights\[1\] must be on .* as x is, got meta"):
        linear_relu_stack(x, [first, second.to("meta")], biases)
