"""``DIN`` against the same network written out, one candidate after the other."""

import itertools

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.packed_histories import packed_histories
from tests.support.tolerance import assert_follows
from tests.support.values import normal
from torchembed.models import DIN, Impressions

NUM_ITEMS, DIM, LONGEST = 11, 3, 4


def model_of(device: torch.device) -> DIN:
    torch.manual_seed(0)
    items = torchembed.Embedding(NUM_ITEMS, DIM, device=device, seed=0)
    return DIN(
        items,
        embedding_dim=DIM,
        max_length=LONGEST,
        attention_sizes=(6, 5),
        layer_sizes=(7,),
        dense_device=device,
    )


def impressions_of(lengths: list[int], device: torch.device) -> Impressions:
    histories = packed_histories(lengths, num_items=NUM_ITEMS, spare=2)
    candidates = torch.arange(2 * len(lengths)).view(-1, 2) % NUM_ITEMS
    return Impressions(histories.items, histories.offsets, candidates).mapped(
        lambda tensor: tensor.to(device)
    )


def formula(values: dict[str, Tensor], impressions: Impressions) -> Tensor:
    """``[B, C]`` by the values of the model's parameters."""

    def layers(name: str, x: Tensor, count: int) -> Tensor:
        for layer in range(0, 2 * count, 2):
            x = x @ values[f"{name}.{layer}.weight"].T + values[f"{name}.{layer}.bias"]
            if layer < 2 * count - 2:
                x = torch.where(x > 0, x, values[f"{name}.{layer + 1}.weight"] * x)
        return x

    table, logits = values["items.weight"], []
    bounds = itertools.pairwise(impressions.offsets.tolist())
    for (start, end), candidates in zip(bounds, impressions.candidates.tolist(), strict=True):
        for candidate in candidates:
            q, interest = table[candidate], torch.zeros_like(table[0])
            for item in impressions.items[start : min(end, start + LONGEST)].tolist():
                k = table[item]
                weight = layers("attention", torch.cat([q, k, q - k, q * k]), 3)
                interest = interest + weight * k
            logits.append(layers("deep", torch.cat([interest, q, interest * q]), 2))
    return torch.cat(logits).view(impressions.candidates.shape)


@pytest.mark.parametrize("lengths", [[3, 0, 4, 1], [6, 1]], ids=str)
def test_follows_the_formula(lengths: list[int], device: torch.device) -> None:
    model, impressions = model_of(device), impressions_of(lengths, device)
    upstream = normal(len(lengths), 2, seed=5, device=device)
    parameters = dict(model.named_parameters())

    def expected(dtype: torch.dtype) -> list[Tensor]:
        leaves = {n: p.detach().to(dtype).requires_grad_() for n, p in parameters.items()}
        found = formula(leaves, impressions)
        return [found, *torch.autograd.grad(found, list(leaves.values()), upstream.to(dtype))]

    logits = model(impressions)
    actual = [logits, *torch.autograd.grad(logits, list(parameters.values()), upstream)]
    for which, result in enumerate(actual):
        assert_follows(result, lambda dtype, which=which: expected(dtype)[which])
