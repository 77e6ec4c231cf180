"""Linear layers of a model whose products are in 8 bits."""

import pytest
import torch
from torch import nn

from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.modules import MLP
from torchembed.modules.dense.float8_linear import Float8Linear, use_float8_products
from torchembed.ops.linear.float8 import float8_linear


class _Derived(nn.Linear):
    pass


def test_wide_layers_change_and_keep_what_they_are() -> None:
    model = nn.ModuleDict(
        {"top": MLP(64, [32, 48, 8]), "plain": nn.Linear(32, 32, bias=False)}
        | {"odd": nn.Linear(40, 40), "derived": _Derived(64, 64)}
    )
    before, parameters = model.state_dict(), list(model.parameters())
    seen = []
    model["plain"].register_forward_hook(lambda *_: seen.append(1))
    assert use_float8_products(model, least_width=32) == ["top.0", "top.2", "plain"]
    assert [type(model["top"][index]) for index in (0, 2)] == [Float8Linear] * 2
    assert not isinstance(model["top"][4], Float8Linear)
    assert not any(isinstance(model[name], Float8Linear) for name in ("odd", "derived"))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    x = normal(5, 32, seed=1)
    assert_same_bits(model["plain"](x), float8_linear(x, model["plain"].weight))
    assert seen == [1]


def test_an_mlp_learns_as_without() -> None:
    x, losses = normal(256, 32, seed=1), []
    target = x[:, :1] * x[:, 1:2]
    for is_float8 in (False, True):
        torch.manual_seed(1)
        model = MLP(32, [64, 64, 1], activation_on_last=False)
        if is_float8:
            use_float8_products(model, least_width=32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x).float() - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    first = float(target.square().mean())
    assert all(loss < 0.1 * first for loss in losses)


def test_a_model_without_wide_layers_is_refused() -> None:
    message = (
        r"^model must have a linear layer of at least 512 columns and rows, multiples of 16, got "
        r"none; lower least_width$"
    )
    with pytest.raises(ValueError, match=message):
        use_float8_products(MLP(64, [32]))
