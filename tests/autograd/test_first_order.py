"""Layers whose backward cannot be differentiated say so, and what to use."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.ops.cross import cross_epilogue, low_rank_cross_network
from torchembed.ops.linear import linear, linear_relu, linear_relu_stack


def leaf(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count).view(shape) / count - 0.25).requires_grad_()


LAYERS: dict[str, Callable[[], tuple[Tensor, list[Tensor]]]] = {
    "linear layer .* use torch.nn.functional.linear there": lambda: (
        linear(x := leaf(3, 4), weight := leaf(2, 4)),
        [x, weight],
    ),
    "linear layer .*": lambda: (linear(x := leaf(3, 4), leaf(1, 4), leaf(1)), [x]),
    "linear layer": lambda: (linear_relu(x := leaf(3, 4), leaf(2, 4), leaf(2)), [x]),
    "linear layer has": lambda: (
        linear_relu_stack(x := leaf(3, 4), [leaf(2, 4), leaf(3, 2)], [leaf(2), leaf(3)]),
        [x],
    ),
    r"cross epilogue .* use x0 \* \(z \+ bias\) \+ x there": lambda: (
        cross_epilogue(x := leaf(3, 4), leaf(3, 4), leaf(4), leaf(3, 4)),
        [x],
    ),
    "low-rank cross network": lambda: (
        low_rank_cross_network(x := leaf(3, 4), [leaf(2, 4)], [leaf(4, 2)], [leaf(4)]),
        [x],
    ),
    "binary_cross_entropy .* use torch.nn.functional": lambda: (
        binary_cross_entropy(x := leaf(5), torch.ones(5)),
        [x],
    ),
}


@pytest.mark.parametrize("words", LAYERS)
def test_a_second_derivative_is_refused_by_name(words: str) -> None:
    output, inputs = LAYERS[words]()
    plain = torch.autograd.grad(output.square().sum(), inputs, retain_graph=True)
    gradients = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    # The first derivative is what it is without.
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients, strict=True))
    with pytest.raises(RuntimeError, match=rf"^torchembed's {words}") as error:
        sum(gradient.square().sum() for gradient in gradients).backward()
    assert "has no second derivative, and one was asked for (create_graph=True" in str(error.value)
