"""``linear`` and ``linear_relu`` against torch's, and their gradients deferred."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import lanes
from tests.support.repeats import assert_repeats
from tests.support.tolerance import (
    assert_as_near,
    assert_follows,
    assert_same_bits,
    assert_same_sums,
)
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous, whole
from torchembed.autograd.gradient_slots import slot_of
from torchembed.autograd.weight_gradients import DeferredWeightGradients, are_waiting
from torchembed.modules import MLP, Cross, LowRankCross
from torchembed.ops.linear import linear, linear_relu
from torchembed.optim import DenseSGD

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {"one": (1, 1, 1), "odd": (9, 13, 5), "none": (0, 4, 3), "several_blocks": (1200, 3, 150)}
SHAPES |= {"to_one": (9, 300, 1), "many_to_one": (1200, 70, 1), "none_to_one": (0, 4, 1)}


def relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, weight, bias))


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    num_rows, depth, width = shape
    return [
        normal(num_rows, depth, seed=1, dtype=dtype, device=device),
        normal(width, depth, seed=2, dtype=dtype, device=device),
        normal(width, seed=3, dtype=dtype, device=device),
    ]


def whole_inputs(shape: tuple[int, int, int], device: torch.device) -> list[Tensor]:
    """The same of whole numbers, whose results are whole numbers in any order of sums."""
    num_rows, depth, width = shape
    sizes = ((num_rows, depth), (width, depth), (width,))
    return [whole(*size, seed=seed, device=device) for seed, size in enumerate(sizes, start=1)]


def make_whole(module: nn.Module) -> None:
    """Give the parameters whole numbers, of 1 at most."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=seed, largest=1))


def results(
    function: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    """The output, and the gradient of each input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, grad)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("function", "formula"),
    [(linear, F.linear), (linear_relu, relu), (lambda x, w, b: linear(x, w) + b, F.linear)],
    ids=["linear", "relu", "without bias"],
)
def test_follows_its_formula(
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tensors = inputs(shape, dtype, device)
    grad = normal(shape[0], shape[2], seed=4, dtype=dtype, device=device)
    found = results(function, tensors, grad)
    exact = results(formula, [t.double() for t in tensors], grad.double())
    eager = results(formula, tensors, grad)
    for actual, low, true in zip(found, eager, exact, strict=True):
        assert actual.dtype == dtype
        assert_as_near(actual, low, true)


def test_gradients_stop_where_nothing_passed(device: torch.device) -> None:
    x, weight = torch.ones(2, 1, device=device), torch.tensor([[1.0], [-1.0], [0.0]], device=device)
    bias = torch.zeros(3, device=device)
    grad = torch.tensor([[3.0, 4.0, 5.0]] * 2, device=device)
    output, grad_x, grad_weight, grad_bias = results(linear_relu, [x, weight, bias], grad)
    assert output.tolist() == [[1.0, 0.0, 0.0]] * 2
    assert grad_x.tolist() == [[3.0]] * 2
    assert grad_weight.tolist() == [[6.0], [0.0], [0.0]]
    assert grad_bias.tolist() == [6.0, 0.0, 0.0]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2048), (torch.bfloat16, 256)])
@pytest.mark.parametrize("function", [linear, linear_relu])
def test_the_gradient_of_the_bias_is_summed_in_float32(
    function: Callable[..., Tensor], dtype: torch.dtype, limit: int, device: torch.device
) -> None:
    # In dtype, limit + 1 is limit again.
    grad = torch.ones(limit + 1, 1, dtype=dtype, device=device)
    grad[0] = limit
    x = torch.ones(limit + 1, 1, dtype=dtype, device=device)
    weight = torch.ones(1, 1, dtype=dtype, device=device)
    bias = torch.zeros(1, dtype=dtype, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(function(x, weight, bias), bias, grad)
    assert found.item() == 2 * limit


def test_any_number_of_dimensions(device: torch.device) -> None:
    _, weight, bias = whole_inputs((1, 4, 3), device)
    for shape in ((4,), (2, 5, 4)):
        x = whole(*shape, seed=0, device=device)
        assert linear(x, weight, bias).shape == (*shape[:-1], 3)
        assert torch.equal(linear_relu(x, weight, bias), relu(x, weight, bias))


def test_inputs_need_not_be_contiguous(device: torch.device) -> None:
    tensors = whole_inputs((7, 6, 5), device)
    grad = whole(7, 5, seed=5, device=device)

    def strided(*leaves: Tensor) -> Tensor:
        return linear_relu(*(not_contiguous(leaf) for leaf in leaves))

    expected = results(linear_relu, tensors, grad)
    for actual, same in zip(results(strided, tensors, not_contiguous(grad)), expected, strict=True):
        assert torch.equal(actual, same)


def test_a_part_of_a_concatenation(device: torch.device) -> None:
    x, weight, bias = whole_inputs((7, 6, 5), device)
    other, grad = whole(7, 3, seed=6, device=device), whole(7, 8, seed=7, device=device)
    for first in (False, True):

        def concatenated(*leaves: Tensor, first: bool = first) -> Tensor:
            parts = [linear_relu(*leaves), other]
            return torch.cat(parts if first else parts[::-1], dim=1)

        found = results(concatenated, [x, weight, bias], grad)[1:]
        part = grad[:, :5] if first else grad[:, 3:]
        expected = results(relu, [x, weight, bias], part.contiguous())[1:]
        for actual, same in zip(found, expected, strict=True):
            assert torch.equal(actual, same)


def test_only_what_is_asked_for(device: torch.device) -> None:
    x, weight, bias = inputs((4, 3, 2), torch.float32, device)
    for function in (linear, linear_relu):
        for wanted in (x, weight, bias):
            for tensor in (x, weight, bias):
                tensor.requires_grad_(tensor is wanted)
            function(x, weight, bias).sum().backward()
            assert wanted.grad is not None
            assert sum(tensor.grad is not None for tensor in (x, weight, bias)) == 1
            wanted.grad = None


def test_under_autocast(device: torch.device) -> None:
    module = MLP(6, [5, 1], activation_on_last=False, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output = module(normal(4, 6, seed=0, device=device))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


def test_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    tensors = inputs((1200, 4, 40), torch.bfloat16, device)
    grad = normal(1200, 40, seed=5, dtype=torch.bfloat16, device=device)
    assert_repeats(lambda: results(linear_relu, tensors, grad))


@pytest.mark.parametrize("num_rows", [0, 1, 128, 300])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_each_128_samples(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    def small(*shape: int, seed: int) -> Tensor:
        return whole(*shape, seed=seed, dtype=dtype, device=device)

    output, weight = small(num_rows, 37, seed=0), small(3, 37, seed=1)
    for op, inputs in (
        (torch.ops.torchembed.linear_relu_backward, (small(num_rows, 37, seed=2),)),
        (torch.ops.torchembed.linear_relu_input_backward, (small(num_rows, 3, seed=3), weight)),
    ):
        grad = inputs[0].float() @ inputs[1].float() if len(inputs) == 2 else inputs[0].float()
        expected = torch.where(output > 0, grad, 0)
        sums = torch.full((-(-num_rows // 128), 37), torch.nan, device=device)
        assert torch.equal(op(*inputs, output, sums), expected.to(dtype))
        for partial, rows in zip(sums, expected.split(128), strict=False):
            assert torch.equal(partial, rows.sum(0))
        total = torch.full((37,), torch.nan, dtype=dtype, device=device)
        assert torch.equal(op(*inputs, output, total), expected.to(dtype))
        assert torch.equal(total, expected.sum(0).to(dtype))


def test_opcheck(device: torch.device) -> None:
    grad, output = normal(4, 5, seed=0, device=device), normal(4, 5, seed=1, device=device)
    total = torch.zeros(5, device=device)
    ops = torch.ops.torchembed
    torch.library.opcheck(ops.linear_relu_backward.default, (grad, output, total))
    torch.library.opcheck(ops.linear_relu_backward.default, (grad, output, total[None].clone()))
    square = normal(5, 5, seed=3, device=device)
    for sums in (total, total[None].clone()):
        arguments = (grad, square, output, sums)
        torch.library.opcheck(ops.linear_relu_input_backward.default, arguments)
    torch.library.opcheck(ops.sum_rows.default, (grad, total))
    torch.library.opcheck(ops.sum_partials.default, (grad, total))
    weight, bias = normal(1, 5, seed=2, device=device), total[:1]
    torch.library.opcheck(ops.linear_to_one_forward.default, (output, weight, bias))
    arguments = (grad[:, :1].contiguous(), output, weight, weight.clone(), bias)
    torch.library.opcheck(ops.linear_to_one_backward.default, arguments)


def test_compiles_whole_for_any_batch_size(device: torch.device) -> None:
    module = MLP(6, [5, 3], activation_on_last=False, device=device)
    make_whole(module)
    DenseSGD(module.parameters())
    compiled = compiled_once(module)
    for batch_size in (4, 7):
        x = whole(batch_size, 6, seed=0, device=device)
        compiled(x).sum().backward()
        found = [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad()
        module(x).sum().backward()
        for grad, parameter in zip(found, module.parameters(), strict=True):
            assert torch.equal(grad, parameter.grad)
        module.zero_grad()


def test_bad_arguments_are_named(device: torch.device) -> None:
    x, weight, bias = inputs((4, 3, 2), torch.float32, device)
    with pytest.raises(
        ValueError, match=r"x must be \[..., 3\] for a weight of shape \(2, 3\), got"
    ):
        linear(x[:, :2], weight, bias)
    with pytest.raises(TypeError, match="x must be float32, got bfloat16; cast one of them"):
        linear(x.bfloat16(), weight, bias)
    with pytest.raises(ValueError, match=r"bias must hold 2 elements \(one for each row of weight"):
        linear_relu(x, weight, bias[:1])
    with pytest.raises(ValueError, match=r"weight must have 2 dimension\(s\), got shape \(3,\)"):
        linear(x, weight[0])
    with pytest.raises(TypeError, match=r"weight must be float32 or .*, got float64"):
        linear(x.double(), weight.double())
    with pytest.raises(ValueError, match=r"weight must be on .* as x is, got meta"):
        linear(x, weight.to("meta"), bias)


class Deferrable(nn.Module):
    """Layers that defer their weights' gradients around one that does not."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = MLP(6, [5, 8], device=device)
        self.between = nn.Linear(8, 8, device=device)
        self.cross = LowRankCross(8, 2, 3, device=device)
        self.full_cross = Cross(8, 1, device=device)
        self.last = MLP(8, [4, 1], activation_on_last=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.full_cross(self.cross(self.between(self.first(x)))))

    def deferred(self) -> list[nn.Parameter]:
        mlps = (self.first, self.last)
        # Nothing of a layer of one row is ever deferred.
        of_mlps = [p for mlp in mlps for p in mlp.parameters() if len(p) > 1]
        # Of float32, a bias whose sums are those of a product's tiles is not.
        of_cross = [*self.cross.v, *self.cross.u, self.cross.bias[-1]]
        return [*of_mlps, *of_cross, *self.full_cross.weight]


def gradients_by_torch(module: Deferrable, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the output's sum for all parameters, by torch's own operations in ``dtype``."""
    leaves = [parameter.detach().to(dtype).requires_grad_() for parameter in module.parameters()]
    of = dict(zip(map(id, module.parameters()), leaves, strict=True))

    def through(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, of[id(layer.weight)], of[id(layer.bias)])

    x = x.detach().to(dtype)
    for layer in (module.first[0], module.first[2]):
        x = F.relu(through(layer, x))
    first = x = through(module.between, x)
    cross = module.cross
    for v, u, bias in zip(cross.v, cross.u, cross.bias, strict=True):
        x = first * F.linear(F.linear(x, of[id(v)]), of[id(u)], of[id(bias)]) + x
    first, cross = x, module.full_cross
    for weight, bias in zip(cross.weight, cross.bias, strict=True):
        x = first * F.linear(x, of[id(weight)], of[id(bias)]) + x
    x = through(module.last[2], F.relu(through(module.last[0], x)))
    return list(torch.autograd.grad(x.sum(), leaves))


@pytest.mark.parametrize("is_flat", [False, True])
def test_deferred_gradients_are_the_same(is_flat: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    module = Deferrable(device)
    x = normal(7, 6, seed=0, device=device).requires_grad_()
    module(x).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    sizes = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for sample in x.detach():
        module.zero_grad()
        module(sample[None]).sum().backward()
        for size, parameter in zip(sizes, module.parameters(), strict=True):
            size += parameter.grad.abs()
    expected_x, x.grad = x.grad, None
    module.zero_grad()
    if is_flat:
        DenseSGD(module.parameters())
    hooked: set[int] = set()

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            hooked.add(id(parameter))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    late = {id(parameter) for parameter in module.deferred()}
    with DeferredWeightGradients() as deferred:
        module(x).sum().backward()
        assert_same_bits(x.grad, expected_x)
        for parameter in module.parameters():
            assert (parameter.grad is None) == (id(parameter) in late)
        assert not hooked & late
        assert are_waiting()
        deferred.run()
        assert not are_waiting()
        assert hooked == {id(parameter) for parameter in module.parameters()}
    elsewhere = {*module.between.parameters(), *module.full_cross.bias}
    for parameter, same, size in zip(module.parameters(), expected, sizes, strict=True):
        if parameter.dim() == 1 and id(parameter) in late:
            # Sums of a bias may be added up in another order.
            assert_same_sums(parameter.grad, same, size, num_roundings=len(x))
        else:
            assert_same_bits(parameter.grad, same)
        in_place = is_flat and slot_of(parameter).holds(parameter.grad)
        assert in_place == (is_flat and parameter not in elsewhere)
    with DeferredWeightGradients():
        module(x).sum().backward()
    # Onto the gradients of before a product may add its terms one by one.
    for parameter, same, size in zip(module.parameters(), expected, sizes, strict=True):
        assert_same_sums(parameter.grad, 2 * same, 2 * size, num_roundings=2 * len(x))


def test_sums_of_many_samples_are_deferred_too(device: torch.device) -> None:
    module = nn.Sequential(MLP(6, [5, 8]), LowRankCross(8, 2, 3)).to(device, torch.bfloat16)
    # What is summed is whole numbers whose sizes add up to less than 2**16: in no order does a
    # float32 sum round before it is rounded to bfloat16.
    make_whole(module)
    x = whole(1100, 6, seed=0, largest=1, dtype=torch.bfloat16, device=device)
    module(x).float().sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    with DeferredWeightGradients():
        module(x).float().sum().backward()
        assert all(parameter.grad is None for parameter in module.parameters())
    for parameter, same in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, same)
    module[1].bias[0].requires_grad_(False)
    module.zero_grad()
    with DeferredWeightGradients():
        module(x).float().sum().backward()
    assert module[1].bias[0].grad is None


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_deferred_gradients_have_the_same_bits(
    autocast: torch.dtype | None, device: torch.device
) -> None:
    """Whichever order the sums over samples are taken in, which is seen by float32 parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(MLP(6, [16, 8]), LowRankCross(8, 2, 3), MLP(8, [1])).to(device)
    x = normal(300, 6, seed=0, device=device)

    def loss() -> Tensor:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            return module(x).float().square().sum()

    loss().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    with DeferredWeightGradients():
        loss().backward()
    for parameter, same in zip(module.parameters(), expected, strict=True):
        assert parameter.grad.dtype is torch.float32
        assert_same_bits(parameter.grad, same)


def test_under_autocast_products_for_float32_gradients_are_not_rounded(
    device: torch.device,
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU, whose products of bfloat16 have float32 sums")
    layer = nn.Linear(64, 32, device=device)
    x, grad = (normal(300, width, seed=width, device=device).bfloat16() for width in (64, 32))
    with torch.autocast("cuda", torch.bfloat16):
        out = linear(x, layer.weight, layer.bias)
    out.backward(grad)
    assert_follows(layer.weight.grad, lambda dtype: grad.to(dtype).t() @ x.to(dtype))
    assert_follows(layer.bias.grad, lambda dtype: grad.to(dtype).sum(0))


def test_a_frozen_weight_of_one_row_takes_no_slot(device: torch.device) -> None:
    layer = nn.Linear(6, 1).to(device)
    DenseSGD(layer.parameters())
    layer.weight.requires_grad_(False)
    x = normal(3, 6, seed=0, device=device)
    linear(x, layer.weight, layer.bias).sum().backward()
    layer.weight.requires_grad_(True)
    linear(x, layer.weight, layer.bias).sum().backward()
    assert slot_of(layer.weight).holds(layer.weight.grad)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_under_autocast_parameters_of_64_bits_are_an_error(name: str, device: torch.device) -> None:
    parameters = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    parameters[name] = parameters[name].double()
    on_device = {key: parameter.to(device) for key, parameter in parameters.items()}
    with torch.autocast(device.type, torch.bfloat16), pytest.raises(TypeError) as raised:
        linear(torch.ones(4, 3, device=device), **on_device)
    assert f"{name} must be" in str(raised.value)
    assert "float64" in str(raised.value)


def on_cpu(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x)


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


@pytest.mark.parametrize("call", [on_cpu, recomputed])
@pytest.mark.parametrize("is_flat", [False, True])
def test_gradients_reach_weights_that_hooks_have_saved(
    call: Callable[[nn.Module, Tensor], Tensor], is_flat: bool, device: torch.device
) -> None:
    # Where hooks save tensors, backward gets other ones than the parameters. Biases of so many
    # samples are summed in parts, which the interpreter takes half a minute for.
    num_samples = 7 if lanes.is_interpreted() else 1100
    torch.manual_seed(0)
    module = Deferrable(device)
    x = normal(num_samples, 6, seed=0, device=device).requires_grad_()
    eager, exact = (gradients_by_torch(module, x, d) for d in (torch.float32, torch.float64))

    def assert_gradients() -> None:
        for parameter, low, true in zip(module.parameters(), eager, exact, strict=True):
            assert_as_near(parameter.grad, low, true)

    if is_flat:
        DenseSGD(module.parameters())
    late = {id(parameter) for parameter in module.deferred()}
    with DeferredWeightGradients():
        call(module, x).sum().backward()
        assert all(p.grad is None for p in module.parameters() if id(p) in late)
    assert_gradients()
    module.zero_grad()
    call(module, x).sum().backward()
    assert_gradients()


@pytest.mark.parametrize("is_flat", [False, True])
def test_under_autocast_gradients_are_deferred_too(is_flat: bool, device: torch.device) -> None:
    """Gradients come in the parameters' own dtype."""
    module = Deferrable(device)
    # Whole numbers, whose sums no order rounds.
    make_whole(module)
    x = whole(7, 6, seed=0, largest=1, device=device)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return module(x).float().sum()

    loss().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    if is_flat:
        DenseSGD(module.parameters())
    # Of 16 bits, the biases of all cross layers are.
    late = {id(parameter) for parameter in (*module.deferred(), *module.cross.bias)}
    with DeferredWeightGradients() as deferred:
        loss().backward()
        for parameter in module.parameters():
            assert (parameter.grad is None) == (id(parameter) in late)
        assert {id(weight) for weight in deferred.weights} == late
    for parameter, same in zip(module.parameters(), expected, strict=True):
        assert parameter.grad.dtype is torch.float32
        assert_same_bits(parameter.grad, same)
        if is_flat and id(parameter) in late:
            assert slot_of(parameter).holds(parameter.grad)
    hooked = module.last[0].weight
    hooked.register_hook(lambda grad: 2 * grad)
    module.zero_grad()
    with DeferredWeightGradients() as deferred:
        loss().backward()
        assert hooked.grad is not None
    position = next(n for n, p in enumerate(module.parameters()) if p is hooked)
    assert_same_bits(hooked.grad, 2 * expected[position])
    module.cross.v[0].requires_grad_(False)
    module.zero_grad()
    with DeferredWeightGradients() as deferred:
        loss().backward()
    assert module.cross.v[0].grad is None
    assert id(module.cross.v[0]) not in {id(weight) for weight in deferred.weights}
    position = next(n for n, p in enumerate(module.parameters()) if p is module.cross.u[0])
    assert_same_bits(module.cross.u[0].grad, expected[position])


def test_under_autocast_gradients_of_a_shared_weight_are_added_up(device: torch.device) -> None:
    layer = MLP(4, [4], device=device)
    make_whole(layer)
    x = whole(3, 4, seed=0, largest=1, device=device)
    weight = layer[0].weight

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return layer(layer(x)).float().sum() + weight.square().sum()

    loss().backward()
    expected, weight.grad = weight.grad, None
    with DeferredWeightGradients():
        loss().backward()
    assert torch.equal(weight.grad, expected)


def test_deferred_gradients_of_a_shared_weight_are_added_up(device: torch.device) -> None:
    layer = MLP(4, [4], device=device)
    make_whole(layer)
    x = whole(3, 4, seed=0, device=device)
    weight = layer[0].weight

    def loss() -> Tensor:
        return layer(layer(x)).sum() + weight.square().sum()

    loss().backward()
    expected, weight.grad = weight.grad, None
    with DeferredWeightGradients():
        loss().backward()
    assert torch.equal(weight.grad, expected)


def test_frozen_parameters_get_no_gradients(device: torch.device) -> None:
    module = Deferrable(device)
    frozen = [*module.first.parameters(), *module.cross.parameters(), module.last[2].weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for manager in (contextlib.nullcontext(), DeferredWeightGradients()):
        with manager:
            module(normal(7, 6, seed=0, device=device)).sum().backward()
        assert all(parameter.grad is None for parameter in frozen)
    assert module.last[0].weight.grad is not None


@pytest.mark.gpu
def test_a_stream_takes_one_gradient_of_a_weight(device: torch.device) -> None:
    layer = MLP(4, [4], device=device)
    x = normal(3, 4, seed=0, device=device)
    with (
        pytest.raises(RuntimeError, match=r"a weight of shape \(4,\) has two gradients within"),
        DeferredWeightGradients(torch.cuda.Stream()),
    ):
        layer(layer(x)).sum().backward()


def test_what_cannot_be_deferred(device: torch.device) -> None:
    layer = MLP(4, [4], device=device)
    x = normal(3, 4, seed=0, device=device)
    with (
        DeferredWeightGradients(),
        pytest.raises(RuntimeError, match="gradients of weights are deferred already; leave"),
        DeferredWeightGradients(),
    ):
        pass
    # It left nothing behind.
    layer(x).sum().backward()
    assert layer[0].weight.grad is not None


@pytest.mark.parametrize(
    "op", ["linear_relu_backward", "linear_relu_input_backward", "sum_rows", "sum_partials"]
)
def test_the_lane_runs_its_kernels(op: str, device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    assert lanes.picked_kernel(op, device) == ("reference" if lane == "native" else lane)
