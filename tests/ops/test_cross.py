"""The cross layers of DCN-V2 against their formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support import lanes
from tests.support.repeats import assert_repeats
from tests.support.tolerance import assert_as_near, assert_follows, assert_same_bits
from tests.support.values import normal, not_contiguous, whole
from torchembed.ops.cross import cross_epilogue, full_rank_cross, low_rank_cross_network

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {
    "one_element": (1, 1),
    "no_samples": (0, 5),
    "no_columns": (3, 0),
    "one_column": (9, 1),
    "odd": (11, 37),
    "several_blocks": (131, 300),
}


def formula_epilogue(x0: Tensor, z: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return x0 * (z + bias) + x


def formula_network(x0: Tensor, *parameters: Tensor) -> Tensor:
    num_layers, x = len(parameters) // 3, x0
    for layer in range(num_layers):
        v, u, bias = parameters[layer::num_layers]
        x = x0 * (x @ v.T @ u.T + bias) + x
    return x


def network(x0: Tensor, *parameters: Tensor) -> Tensor:
    """``low_rank_cross_network`` of v, u and bias of each layer in turn."""
    num_layers = len(parameters) // 3
    v, u, bias = (parameters[part * num_layers :][:num_layers] for part in range(3))
    return low_rank_cross_network(x0, v, u, bias)


def network_inputs(
    shape: tuple[int, int], rank: int, num_layers: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """x0, then v, u and bias of each layer."""
    width = shape[1]
    sizes = [shape, *[(rank, width)] * num_layers, *[(width, rank)] * num_layers]
    matrices = [
        normal(*size, seed=seed, dtype=dtype, device=device) / (1 if seed == 0 else size[1])
        for seed, size in enumerate(sizes)
    ]
    biases = [
        normal(width, seed=100 + layer, dtype=dtype, device=device) for layer in range(num_layers)
    ]
    return [*matrices, *biases]


def formula_full_rank(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x0 * (x @ weight.T + bias) + x


def epilogue_inputs(
    shape: tuple[int, int], device: torch.device, *dtypes: torch.dtype
) -> list[Tensor]:
    """x0, z, bias and x; of one dtype, or of one each."""
    x0, z, bias, x = dtypes if len(dtypes) == 4 else dtypes * 4
    return [
        normal(*shape, seed=1, dtype=x0, device=device),
        normal(*shape, seed=2, dtype=z, device=device),
        normal(shape[1], seed=3, dtype=bias, device=device),
        normal(*shape, seed=4, dtype=x, device=device),
    ]


def results(
    function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    """The output, and the gradient of each input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, grad)


def check(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Forward and every gradient follow ``formula``, in the dtypes of the inputs."""
    with torch.no_grad():
        output = function(*inputs)
    grad = normal(*output.shape, seed=9, dtype=output.dtype, device=output.device)

    def expected(dtype: torch.dtype, which: int) -> Tensor:
        exact = [tensor.cpu().to(dtype) for tensor in inputs]
        return results(formula, exact, grad.cpu().to(dtype))[which]

    for which, actual in enumerate(results(function, inputs, grad)):
        assert which == 0 or actual.dtype == inputs[which - 1].dtype
        assert_follows(actual, lambda dtype, which=which: expected(dtype, which))


@pytest.mark.parametrize(
    "op",
    [
        "cross_epilogue_forward",
        "cross_epilogue_backward",
        "low_rank_cross_forward",
        "low_rank_cross_scale",
        "low_rank_cross_backward",
        "low_rank_cross_input_backward",
    ],
)
def test_the_lane_runs_its_kernels(op: str, device: torch.device) -> None:
    lane = lanes.required_lane()
    if lane is None:
        pytest.skip("TORCHEMBED_LANE requires no lane, so any kernel will do")
    # There is no C++ kernel: beside those of other operations, torch's own run.
    assert lanes.picked_kernel(op, device) == ("reference" if lane == "native" else lane)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_epilogue_follows_its_formula(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    inputs = epilogue_inputs(shape, device, dtype)
    assert cross_epilogue(*inputs).dtype == dtype
    check(cross_epilogue, formula_epilogue, inputs)


@pytest.mark.parametrize(
    ("dtypes", "promoted"),
    [
        ((torch.float32, torch.bfloat16, torch.float32, torch.float32), torch.float32),
        ((torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16), torch.bfloat16),
        ((torch.float16, torch.float16, torch.float16, torch.float32), torch.float32),
        ((torch.float16, torch.bfloat16, torch.float16, torch.float16), torch.float32),
    ],
)
def test_dtypes_may_be_mixed(
    dtypes: tuple[torch.dtype, ...], promoted: torch.dtype, device: torch.device
) -> None:
    inputs = epilogue_inputs((5, 18), device, *dtypes)
    assert cross_epilogue(*inputs).dtype == promoted
    check(cross_epilogue, formula_epilogue, inputs)


def test_worked_example(device: torch.device) -> None:
    values = ([[2.0, 3.0]], [[4.0, 5.0]], [1.0, -1.0], [[7.0, 8.0]])
    inputs = [torch.tensor(value, device=device) for value in values]
    grad = torch.full((1, 2), 3.0, device=device)
    output, *grads = results(cross_epilogue, inputs, grad)
    assert output.tolist() == [[17.0, 20.0]]
    expected = [[[15.0, 12.0]], [[6.0, 9.0]], [6.0, 9.0], [[3.0, 3.0]]]
    assert [gradient.tolist() for gradient in grads] == expected


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_the_gradient_of_the_bias_is_summed_in_float32(
    dtype: torch.dtype, limit: int, device: torch.device
) -> None:
    # In dtype, limit + 1 is limit again.
    x0 = torch.ones(60, 1, dtype=dtype, device=device)
    x0[0] = limit
    bias = torch.zeros(1, device=device, requires_grad=True)
    output = cross_epilogue(x0, torch.zeros_like(x0), bias, torch.zeros_like(x0))
    (grad,) = torch.autograd.grad(output, bias, torch.ones_like(output))
    assert grad.tolist() == [limit + 59]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_layers_x_is_x0(dtype: torch.dtype, device: torch.device) -> None:
    def first_layer(x0: Tensor, z: Tensor, bias: Tensor) -> Tensor:
        return cross_epilogue(x0, z, bias, x0)

    inputs = epilogue_inputs((11, 37), device, dtype)[:3]
    check(first_layer, lambda x0, z, bias: x0 * (z + bias) + x0, inputs)


def test_inputs_need_not_be_contiguous(device: torch.device) -> None:
    inputs = epilogue_inputs((7, 12), device, torch.float32)
    grad = normal(7, 12, seed=5, device=device)
    expected = results(cross_epilogue, inputs, grad)

    def strided(*leaves: Tensor) -> Tensor:
        return cross_epilogue(*(not_contiguous(leaf) for leaf in leaves))

    for actual, same in zip(results(strided, inputs, not_contiguous(grad)), expected, strict=True):
        assert_same_bits(actual, same)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "rank", "num_layers"),
    [((9, 20), 1, 1), ((9, 20), 8, 3), ((1, 1), 2, 2), ((0, 5), 3, 2), ((131, 150), 70, 2)],
)
def test_the_low_rank_network_follows_its_formula(
    shape: tuple[int, int], rank: int, num_layers: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_products(network, formula_network, network_inputs(shape, rank, num_layers, dtype, device))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("widths", [(20,), (4, 16), (1, 140, 0, 9)], ids=str)
def test_the_input_may_come_in_parts(
    widths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x0, *parameters = network_inputs((9, sum(widths)), 8, 2, dtype, device)
    grad = normal(9, sum(widths), seed=5, dtype=dtype, device=device)
    whole = results(network, [x0, *parameters], grad)
    count = len(widths)

    def of_parts(*tensors: Tensor) -> Tensor:
        layers = tensors[count:]
        v, u, bias = layers[:2], layers[2:4], layers[4:]
        return low_rank_cross_network(tensors[:count], v, u, bias)

    output, *grads = results(of_parts, [*x0.split(widths, dim=1), *parameters], grad)
    assert all(part.is_contiguous() for part in grads[:count])
    joined = [output, torch.cat(grads[:count], dim=1), *grads[count:]]
    for actual, same in zip(joined, whole, strict=True):
        assert_same_bits(actual, same)


@pytest.mark.parametrize("dtype", FLOATS)
def test_parameters_need_not_be_contiguous(dtype: torch.dtype, device: torch.device) -> None:
    inputs = network_inputs((9, 21), 5, 2, dtype, device)
    grad = normal(9, 21, seed=9, dtype=dtype, device=device)

    def strided(*leaves: Tensor) -> Tensor:
        return network(leaves[0], *(not_contiguous(leaf) for leaf in leaves[1:]))

    expected = results(network, inputs, grad)
    for actual, same in zip(results(strided, inputs, grad), expected, strict=True):
        assert_same_bits(actual, same)


def test_many_samples_share_the_sum_of_a_bias(device: torch.device) -> None:
    # So many that several programs sum parts of a column.
    check_products(network, formula_network, network_inputs((1300, 3), 2, 2, torch.float32, device))


def test_the_low_rank_network_by_hand(device: torch.device) -> None:
    x0, v, u, bias = (
        torch.tensor(value, device=device)
        for value in ([[1.0, 2.0]], [[1.0, 2.0]], [[3.0], [-1.0]], [1.0, 0.0])
    )
    # v x0 = 5: x1 = (1 * 16 + 1, 2 * -5 + 2) = (17, -8); v x1 = 1: x2 = (1 * 4 + 17, 2 * -1 - 8).
    assert network(x0, v, v, u, u, bias, bias).tolist() == [[21.0, -10.0]]
    assert low_rank_cross_network(x0, [], [], []) is x0


@pytest.mark.parametrize("dtype", FLOATS)
def test_full_rank_follows_its_formula(dtype: torch.dtype, device: torch.device) -> None:
    x0, _, bias, x = epilogue_inputs((9, 20), device, dtype)
    weight = normal(20, 20, seed=6, dtype=dtype, device=device) / 20
    check_products(full_rank_cross, formula_full_rank, [x0, x, weight, bias])


def check_products(
    function: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """As ``check``, with torch's own low-precision products for what they lose."""
    with torch.no_grad():
        output = function(*inputs)
    grad = normal(*output.shape, seed=9, dtype=output.dtype, device=output.device)
    exact = results(formula, [tensor.double() for tensor in inputs], grad.double())
    eager = results(formula, inputs, grad)
    for actual, low, true in zip(results(function, inputs, grad), eager, exact, strict=True):
        assert_as_near(actual, low, true)


def test_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    inputs = epilogue_inputs((140, 40), device, torch.bfloat16)
    grad = normal(140, 40, seed=5, dtype=torch.bfloat16, device=device)
    assert_repeats(lambda: results(cross_epilogue, inputs, grad))


def test_the_network_repeats_its_bits(device: torch.device, fastest_algorithms: None) -> None:
    inputs = network_inputs((140, 40), 5, 2, torch.bfloat16, device)
    grad = normal(140, 40, seed=5, dtype=torch.bfloat16, device=device)
    assert_repeats(lambda: results(network, inputs, grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype, device: torch.device) -> None:
    x0, z, bias, x = epilogue_inputs((4, 10), device, dtype, dtype, torch.float32, dtype)
    ops = torch.ops.torchembed
    torch.library.opcheck(ops.cross_epilogue_forward.default, (x0, z, bias, x))
    for x_is_x0 in (False, True):
        torch.library.opcheck(ops.cross_epilogue_backward.default, (x, x0, z, bias, x_is_x0))


def test_opcheck_of_the_low_rank_operations(device: torch.device) -> None:
    ops = torch.ops.torchembed
    x0, v, u, bias = network_inputs((4, 10), 3, 1, torch.float32, device)
    h, grad = normal(4, 3, seed=5, device=device), normal(4, 10, seed=6, device=device)
    total = torch.zeros_like(bias)
    torch.library.opcheck(ops.low_rank_cross_forward.default, (x0, h, u, bias, grad))
    torch.library.opcheck(ops.low_rank_cross_scale.default, (grad, x0, total))
    torch.library.opcheck(ops.low_rank_cross_backward.default, (grad, h, v, x0, total))
    arguments = (h, v, [grad, x0], [x0, grad], [3, 7])
    torch.library.opcheck(ops.low_rank_cross_input_backward.default, arguments)


@pytest.mark.parametrize("num_rows", [0, 1, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_each_128_samples(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    def small(*shape: int, seed: int) -> Tensor:
        return whole(*shape, seed=seed, dtype=dtype, device=device)

    grad, x0, grad_h = (small(num_rows, width, seed=width) for width in (37, 36, 3))
    x0, v = torch.cat([x0, x0[:, :1]], dim=1), small(3, 37, seed=1)
    of_scale, of_product = torch.full((2, -(-num_rows // 128), 37), torch.nan, device=device)
    torch.ops.torchembed.low_rank_cross_scale(grad, x0, of_scale)
    torch.ops.torchembed.low_rank_cross_backward(grad, grad_h, v, x0, of_product)
    grad_x = grad.float() + grad_h.float() @ v.float()
    for sums, summed in ((of_scale, grad), (of_product, grad_x)):
        for partial, rows in zip(sums, (summed.float() * x0.float()).split(128), strict=False):
            assert torch.equal(partial, rows.sum(0))


def test_compiles_whole_for_any_batch_size(device: torch.device) -> None:
    backend = CompileCounterWithBackend("aot_eager")

    def two_layers(x0: Tensor, v: Tensor, u: Tensor, bias: Tensor) -> Tensor:
        x0 = low_rank_cross_network(x0, [v, 2 * v], [u, u / 2], [bias, -bias])
        return full_rank_cross(x0, x0, u @ v, bias)

    compiled = torch.compile(two_layers, fullgraph=True, dynamic=True, backend=backend)
    v, u = normal(3, 10, seed=6, device=device), normal(10, 3, seed=7, device=device)
    for batch_size in (4, 7):
        x0, _, bias, _ = epilogue_inputs((batch_size, 10), device, torch.float32)
        inputs, grad = [x0, v, u, bias], normal(batch_size, 10, seed=5, device=device)
        expected = results(two_layers, inputs, grad)
        for actual, same in zip(results(compiled, inputs, grad), expected, strict=True):
            assert_same_bits(actual, same)
    assert backend.frame_count == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning")
def test_compilers_may_pad_what_is_kept_for_backward(device: torch.device) -> None:
    # Of so many columns, and not a multiple of 32, Inductor pads the rows.
    num_columns = 1293

    def layer(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x0 = torch.tanh(inputs)
        return full_rank_cross(x0, x0 * 2, weight, bias)

    inputs = normal(64, num_columns, seed=1, device=device)
    weight = normal(num_columns, num_columns, seed=2, device=device) / num_columns
    bias, grad = (normal(*shape, seed=3, device=device) for shape in ((num_columns,), inputs.shape))
    expected = results(layer, [inputs, weight, bias], grad)
    found = results(torch.compile(layer), [inputs, weight, bias], grad)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_bad_arguments_are_named(device: torch.device) -> None:
    x0, z, bias, x = epilogue_inputs((4, 10), device, torch.float32)
    with pytest.raises(TypeError, match="x0 must be float32 or float16 or bfloat16, got float64"):
        cross_epilogue(x0.double(), z, bias, x)
    with pytest.raises(ValueError, match=r"x0 must have 2 dimension\(s\), got shape \(40,\)"):
        cross_epilogue(x0.flatten(), z, bias, x)
    with pytest.raises(ValueError, match=r"z must have the shape of x0, \(4, 10\), got \(3, 10\)"):
        cross_epilogue(x0, z[:3], bias, x)
    with pytest.raises(TypeError, match=r"x must be float32 or .*, got int64; call \.float"):
        cross_epilogue(x0, z, bias, x.long())
    with pytest.raises(ValueError, match=r"bias must hold 10 elements \(one for each column"):
        cross_epilogue(x0, z, bias[:9], x)
    with pytest.raises(ValueError, match=r"z must be on .* as x0 is, got meta"):
        cross_epilogue(x0, z.to("meta"), bias, x)


def test_bad_layers_are_named(device: torch.device) -> None:
    x0, v, u, bias = network_inputs((4, 10), 3, 1, torch.float32, device)
    with pytest.raises(ValueError, match="v, u and bias must hold one tensor a layer, got 2, 1"):
        low_rank_cross_network(x0, [v, v], [u], [bias])
    with pytest.raises(ValueError, match=r"u\[0\] must have shape \(10, 3\), got \(3, 10\)"):
        low_rank_cross_network(x0, [v], [v], [bias])
    with pytest.raises(TypeError, match=r"v\[0\] must be float32, got bfloat16; cast it"):
        low_rank_cross_network(x0, [v.bfloat16()], [u], [bias])
    with pytest.raises(ValueError, match=r"bias\[0\] must be on .* as x0 is, got meta"):
        low_rank_cross_network(x0, [v], [u], [bias.to("meta")])
    with pytest.raises(TypeError, match="x0 must be float32 or float16 or bfloat16, got float64"):
        low_rank_cross_network(x0.double(), [v], [u], [bias])
    with pytest.raises(ValueError, match="x0 must be a tensor or one part or more, got none"):
        low_rank_cross_network([], [v], [u], [bias])
    with pytest.raises(ValueError, match="x0 must have parts of one batch size, got 4 and 3"):
        low_rank_cross_network([x0[:, :5], x0[:3, 5:]], [v], [u], [bias])
    with pytest.raises(ValueError, match=r"part must be on .* as x0 is, got meta"):
        low_rank_cross_network([x0[:, :5], x0[:, 5:].to("meta")], [v], [u], [bias])


def test_parts_of_several_dtypes(device: torch.device) -> None:
    x0, *parameters = network_inputs((4, 10), 3, 1, torch.float32, device)
    low = x0[:, 5:].bfloat16().requires_grad_()
    v, u, bias = ([parameter] for parameter in parameters)
    output = low_rank_cross_network([x0[:, :5], low], v, u, bias)
    joined = torch.cat([x0[:, :5], low.float()], dim=1)
    assert_same_bits(output, low_rank_cross_network(joined, v, u, bias))
    output.sum().backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
