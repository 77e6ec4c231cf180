"""Layers of TorchRec's models computed by our operations give what they gave, and gradients too."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class NotLinear(nn.Linear):
    pass


class Network(nn.Module):
    """Both kinds of layers, and one of a subclass."""

    def __init__(self) -> None:
        from torchrec.modules.crossnet import LowRankCrossNet

        super().__init__()
        self.below = nn.Linear(6, 8)
        self.cross = LowRankCrossNet(in_features=8, num_layers=3, low_rank=4)
        self.other = NotLinear(8, 8, bias=False)
        self.above = nn.Linear(8, 1, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.other(self.cross(self.below(x))))


def _results(network: Network, x: Tensor, autocast: torch.dtype | None) -> list[Tensor]:
    """The output, and the gradients of input and parameters, float64."""
    leaves = [x, *network.parameters()]
    for leaf in leaves:
        leaf.grad = None
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        output = network(x)
    output.float().square().mean().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert None not in gradients
    return [tensor.detach().double() for tensor in (output, *gradients) if tensor is not None]


def errors(device: torch.device, autocast: torch.dtype | None) -> list[tuple[float, float, float]]:
    """On a rank: ours, torch's and the size, of the output and each gradient."""
    from torchembed.integrations.torchrec.trained_model.fused_layers import fused_forwards

    torch.manual_seed(3)
    network = Network().to(device)
    x = torch.randn(33, 6, device=device, requires_grad=True)
    found = fused_forwards(network)
    assert [module for module, _ in found] == [network.below, network.cross, network.above]
    torchs = _results(network, x, autocast)
    for module, forward in found:
        module.forward = forward
    ours = _results(network, x, autocast)
    for module, _ in found:
        del module.forward
    true = _results(network.double(), x.detach().double().requires_grad_(), None)
    return [
        (float((b - a).abs().max()), float((c - a).abs().max()), float(a.abs().max()))
        for a, b, c in zip(true, ours, torchs, strict=True)
    ]


def messages() -> list[str]:
    """Errors of the layers for inputs that our operations would refuse."""
    from torchembed.integrations.torchrec.trained_model.fused_layers import fused_forwards

    found = []
    for x in (torch.ones(3, 5), torch.ones(3, 4, dtype=torch.float64)):
        ((_, forward),) = fused_forwards(nn.Linear(4, 2))
        found.append(_error_of(lambda: forward(x)))  # noqa: B023
    return found


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def are_torchs() -> list[bool]:
    """True for each case that we lack where the result is torch's own, bit by bit."""
    from torchrec.modules.crossnet import LowRankCrossNet

    from torchembed.integrations.torchrec.trained_model.fused_layers import fused_forwards

    found = []
    for layer, x in (
        (LowRankCrossNet(in_features=4, num_layers=2, low_rank=3), torch.randn(2, 3, 4)),
        (nn.Linear(4, 2).double(), torch.randn(3, 4, dtype=torch.float64)),
        (LowRankCrossNet(in_features=4, num_layers=0), torch.randn(3, 4)),
    ):
        ((_, forward),) = fused_forwards(layer)
        found.append(torch.equal(forward(input=x), layer(x)))
    return found


def everything(device_type: str) -> dict[str, Any]:
    """On a rank."""
    device = torch.device(device_type)
    of_types = [errors(device, autocast) for autocast in (None, torch.bfloat16)]
    return {"errors": of_types, "messages": messages(), "are torch's": are_torchs()}


@pytest.mark.parametrize("autocast", [False, True])
def test_forward_and_gradients_are_the_layers(
    answers: list[dict[str, Any]], autocast: bool
) -> None:
    eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    for error, of_torch, size in answers[0]["fused_layers"]["errors"][autocast]:
        # Under autocast ours rounds what is between the layers of the network, too.
        assert error <= 2 * of_torch + (4 if autocast else 1) * eps * size


def test_what_ours_refuse_torch_refuses_in_its_words(answers: list[dict[str, Any]]) -> None:
    shapes, dtypes = answers[0]["fused_layers"]["messages"]
    assert "shapes cannot be multiplied" in shapes
    assert re.search("same dtype|expected", dtypes)


def test_another_shape_or_type_is_torchs(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["fused_layers"]["are torch's"] == [True] * 3
