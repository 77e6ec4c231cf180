"""``float8_linear`` against float64 products of the rounded factors, and its gradients."""

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal
from torchembed.core.checks import FLOAT_DTYPES
from torchembed.ops.linear import float8, linear
from torchembed.ops.linear.float8 import float8_linear
from torchembed.ops.row_codec import decode_rows, encode_rows

BF16 = torch.finfo(torch.bfloat16).eps / 2
SUMS = {"cpu": torch.finfo(torch.float32).eps, "cuda": 2.0**-13}
"""Error of adding a term, relative to the terms. Tensor cores of compute capability 9.0 align the
products of 8-bit numbers to the largest of them, and keep 13 bits after its first
(C. Zhao et al., "Insights into DeepSeek-V3", ISCA 2025)."""


def rounded(rows: Tensor) -> Tensor:
    """``rows`` in e4m3, in float64."""
    return decode_rows(encode_rows(rows), torch.float32).double()


def assert_is_product(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    """``found`` is ``left @ right.T + bias`` but for the roundings of sums, and to bfloat16."""
    terms, exact = left.abs() @ right.abs().t(), left @ right.t()
    if bias is not None:
        rounded_bias = bias.bfloat16().double()
        terms, exact = terms + rounded_bias.abs(), exact + rounded_bias
    of_sums = (left.shape[1] + 1) * SUMS[found.device.type] * terms
    allowed = of_sums + BF16 * (exact.abs() + of_sums)
    # float16 ends with subnormals.
    allowed = allowed + torch.finfo(found.dtype).tiny
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(9, 16, 32), (300, 48, 16), (1, 32, 32)])
def test_products_are_those_of_rounded_factors(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_rows, depth, width = shape
    x = normal(num_rows, depth, seed=1, dtype=dtype, device=device).requires_grad_()
    weight = normal(width, depth, seed=2, dtype=dtype, device=device).requires_grad_()
    bias = normal(width, seed=3, dtype=dtype, device=device).requires_grad_()
    grad = normal(num_rows, width, seed=4, dtype=dtype, device=device)
    out = float8_linear(x, weight, bias)
    assert out.dtype == dtype
    assert_is_product(out.detach(), rounded(x.detach()), rounded(weight.detach()), bias.detach())
    of_x, *of_parameters = torch.autograd.grad(out, (x, weight, bias), grad)
    assert_is_product(of_x, rounded(grad), rounded(weight.detach().t()), None)
    # Those of the parameters are as without float8.
    expected = torch.autograd.grad(linear(x, weight, bias), (weight, bias), grad)
    for found, of_linear in zip(of_parameters, expected, strict=True):
        assert_same_bits(found, of_linear)


def test_shapes_without_bias_samples_or_all_gradients(device: torch.device) -> None:
    weight = normal(16, 32, seed=1, device=device).requires_grad_()
    x = normal(2, 3, 32, seed=2, device=device)
    out = float8_linear(x, weight)
    assert_same_bits(out, float8_linear(x.view(6, 32), weight).view(2, 3, 16))
    out.sum().backward()
    assert weight.grad is not None
    assert float8_linear(x[:0], weight).shape == (0, 3, 16)


def test_autocast_casts_everything(device: torch.device) -> None:
    x, weight = normal(4, 16, seed=1, device=device), normal(16, 16, seed=2, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out = float8_linear(x, weight, weight[0])
    assert_same_bits(out, float8_linear(x.bfloat16(), weight.bfloat16(), weight[0].bfloat16()))


def test_compiles_once(device: torch.device) -> None:
    weight = normal(16, 32, seed=1, device=device)
    compiled = compiled_once(lambda x: float8_linear(x, weight) + 1)
    for count in (2, 5, 9):
        x = normal(count, 32, seed=count, device=device)
        # The compiler may multiply in another order of sums, and then round to bfloat16.
        torch.testing.assert_close(
            compiled(x), float8_linear(x, weight) + 1, rtol=2 * BF16, atol=0.1
        )


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x, weight = torch.zeros(2, 16, device=device), torch.zeros(16, 16, device=device)
    with pytest.raises(
        ValueError,
        match=r"^weight must have widths that are multiples of 16 .*\(9, 16\); use linear$",
    ):
        float8_linear(x, weight[:9])
    with pytest.raises(
        ValueError, match=r"^x must be \[\.\.\., 16\] for a weight of shape \(16, 16\), got"
    ):
        float8_linear(x[:, :8], weight)
    with pytest.raises(TypeError, match=r"^x must be float32, got float16; cast one of them"):
        float8_linear(x.half(), weight)
    x.requires_grad_()
    grad = torch.autograd.grad(float8_linear(x, weight).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="torchembed's linear layer in float8"):
        grad.sum().backward()


def test_a_gpu_without_such_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    message = (
        r"^x must be on the CPU or a GPU of compute capability 9\.0 or later for products in "
        r"float8, got NVIDIA A100 of 8\.0; use linear$"
    )
    with pytest.raises(ValueError, match=message):
        float8._check_gpu(torch.device("cuda", 0))


@pytest.mark.gpu
def test_captured(device: torch.device) -> None:
    x = normal(256, 128, seed=1, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = normal(64, 128, seed=2, dtype=torch.bfloat16, device=device).requires_grad_()

    def call() -> list[Tensor]:
        out = float8_linear(x, weight)
        # Detached, so that nothing of this call's stream outlives it.
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    with torch.no_grad():
        x.mul_(-3)
    graph.replay()
    for mine, again in zip(found, call(), strict=True):
        assert_same_bits(mine, again)
