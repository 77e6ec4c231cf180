"""``SASRec`` against the same network written out, one history after the other."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchembed
from tests.support.packed_histories import packed_histories
from tests.support.tolerance import NUDGE_UNITS, assert_as_near
from tests.support.values import normal
from torchembed.models import Histories, SASRec

NUM_ITEMS, DIM, LONGEST = 11, 6, 5


def model_of(device: torch.device, *, dropout: float = 0.0) -> SASRec:
    torch.manual_seed(0)
    items = torchembed.Embedding(NUM_ITEMS, DIM, device=device, seed=0)
    return SASRec(
        items,
        embedding_dim=DIM,
        max_length=LONGEST,
        num_blocks=2,
        num_heads=2,
        hidden_dim=7,
        dropout=dropout,
        dense_device=device,
    )


def formula(values: dict[str, Tensor], histories: Histories) -> Tensor:
    """``[L, D]`` by the values of the model's parameters."""

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), eps=1e-8)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ values[f"{name}.weight"].T + values[f"{name}.bias"]

    rows = [torch.zeros_like(values["positions"][0]) for _ in histories.items]
    for start, end in itertools.pairwise(histories.offsets.tolist()):
        end = min(end, start + LONGEST)
        if end == start:
            continue
        x = values["items.weight"][histories.items[start:end]] * math.sqrt(DIM)
        x = x + values["positions"][: end - start]
        for block in ("blocks.0", "blocks.1"):
            query = norm(x)
            q = linear(f"{block}.query", query).unflatten(1, (2, -1))
            k, v = linear(f"{block}.key_value", x).unflatten(1, (2, 2, -1)).unbind(1)
            scores = torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(DIM // 2)
            is_later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(is_later.to(x.device), -torch.inf).softmax(2)
            attended = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
            x = norm(query + linear(f"{block}.out", attended))
            hidden = linear(f"{block}.feed_forward.0", x).relu()
            x = x + linear(f"{block}.feed_forward.3", hidden)
        rows[start:end] = x.unbind()
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [7, 1], [5]], ids=str)
def test_follows_the_formula(lengths: list[int], device: torch.device) -> None:
    model = model_of(device)
    histories = packed_histories(lengths, num_items=NUM_ITEMS, spare=2).mapped(
        lambda tensor: tensor.to(device)
    )
    upstream = normal(len(histories.items), DIM, seed=5, device=device)
    parameters = dict(model.named_parameters())

    def expected(dtype: torch.dtype, nudge: float = 0.0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        leaves = {}
        for name, parameter in parameters.items():
            signs = torch.randint(2, parameter.shape, generator=generator).to(device) * 2 - 1
            nudged = parameter.detach().to(dtype) * (1 + nudge * signs)
            leaves[name] = nudged.requires_grad_()
        found = formula(leaves, histories)
        return [found, *torch.autograd.grad(found, list(leaves.values()), upstream.to(dtype))]

    encoded = model(histories)
    actual = [encoded, *torch.autograd.grad(encoded, list(parameters.values()), upstream)]
    exact, eager = expected(torch.float64), expected(torch.float32)
    # Of so few elements the largest error of one order of operations says little of another's. So
    # a result is right, too, if it is that of parameters that are one rounding off.
    off = expected(torch.float64, NUDGE_UNITS * torch.finfo(torch.float32).eps)
    for result, of_eager, right, of_nudged in zip(actual, eager, exact, off, strict=True):
        slack = (of_nudged - right).detach().abs().max().item() / NUDGE_UNITS
        assert_as_near(result, of_eager, right, slack=slack)


def test_a_later_item_changes_no_earlier_output(device: torch.device) -> None:
    model = model_of(device)
    histories = packed_histories([4, 5], num_items=NUM_ITEMS).mapped(lambda t: t.to(device))
    before = model(histories)
    for place in (2, 8):
        items = histories.items.clone()
        items[place] = (items[place] + 1) % NUM_ITEMS
        after = model(histories._replace(items=items))
        is_after = torch.zeros(9, dtype=torch.bool, device=device)
        is_after[place : 4 if place < 4 else 9] = True
        assert torch.equal(after[~is_after], before[~is_after])
        assert (after[is_after] != before[is_after]).any(1).all()


def test_dropout_is_of_training_alone(device: torch.device) -> None:
    model = model_of(device, dropout=0.5)
    histories = packed_histories([4, 5], num_items=NUM_ITEMS).mapped(lambda t: t.to(device))
    assert not torch.equal(model(histories), model(histories))
    model.eval()
    assert torch.equal(model(histories), model(histories))


def test_heads_divide_the_dim_and_histories_have_a_length() -> None:
    items = torchembed.Embedding(3, 6)
    for num_heads in (4, 0, -1):
        message = rf"^num_heads must divide embedding_dim 6, got {num_heads}$"
        with pytest.raises(ValueError, match=message):
            SASRec(items, embedding_dim=6, max_length=3, num_heads=num_heads)
    with pytest.raises(ValueError, match=r"^max_length must be at least 1, got 0$"):
        SASRec(items, embedding_dim=6, max_length=0)
