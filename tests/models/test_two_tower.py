"""The in-batch softmax, and ``TwoTower`` against the same network written out."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.packed_histories import packed_histories
from tests.support.tolerance import assert_as_near, assert_follows, relative_error
from tests.support.values import normal
from torchembed.models import Impressions, TwoTower, in_batch_softmax

NUM_ITEMS, DIM, LONGEST = 9, 3, 4
PROBABILITIES = torch.arange(NUM_ITEMS) / 40
"""Of item 0 it is 0."""


def losses_of(
    users: Tensor, items: Tensor, ids: list[int], temperature: float, log_q: Tensor | None
) -> Tensor:
    """The loss of each user, written out."""
    losses = []
    for user, own in enumerate(ids):
        exponentials = []
        for place, item in enumerate(ids):
            if item == own and place != user:
                continue
            score = (users[user] * items[place]).sum() / temperature
            exponentials.append((score - (0 if log_q is None else log_q[place])).exp())
            if place == user:
                wanted = exponentials[-1]
        losses.append(-(wanted / sum(exponentials)).log())
    return torch.stack(losses)


@pytest.mark.parametrize("is_corrected", [False, True])
def test_in_batch_softmax_follows_the_formula(is_corrected: bool, device: torch.device) -> None:
    ids = [4, 2, 4, 7]
    given = [normal(4, DIM, seed=seed, device=device) for seed in range(2)]
    log_q = normal(4, seed=2, device=device) if is_corrected else None
    leaves = [part.clone().requires_grad_() for part in given]
    losses = in_batch_softmax(
        *leaves, torch.tensor(ids, device=device), temperature=0.5, log_probabilities=log_q
    )
    actual = [losses, *torch.autograd.grad(losses.sum(), leaves)]

    def expected(dtype: torch.dtype) -> list[Tensor]:
        exact = [part.to(dtype).requires_grad_() for part in given]
        found = losses_of(*exact, ids, 0.5, None if log_q is None else log_q.to(dtype))
        return [found, *torch.autograd.grad(found.sum(), exact)]

    for which, result in enumerate(actual):
        assert_follows(result, lambda dtype, which=which: expected(dtype)[which])


@pytest.mark.parametrize("probabilities", [None, PROBABILITIES])
def test_follows_the_formula(probabilities: Tensor | None, device: torch.device) -> None:
    torch.manual_seed(0)
    model = TwoTower(
        torchembed.Embedding(NUM_ITEMS, DIM, device=device, seed=0),
        embedding_dim=DIM,
        max_length=LONGEST,
        layer_sizes=(5, 4),
        temperature=0.5,
        item_probabilities=probabilities,
        dense_device=device,
    )
    histories = packed_histories([3, 0, 6, 1], num_items=NUM_ITEMS, spare=2)
    chosen = [4, 2, 4, 7]
    impressions = Impressions(
        histories.items, histories.offsets, torch.tensor(chosen).unsqueeze(1)
    ).mapped(lambda tensor: tensor.to(device))
    parameters = dict(model.named_parameters())

    def tower(values: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        hidden = (x @ values[f"{name}.0.weight"].T + values[f"{name}.0.bias"]).relu()
        found = hidden @ values[f"{name}.2.weight"].T + values[f"{name}.2.bias"]
        return found / found.square().sum().sqrt()

    def formula(values: dict[str, Tensor]) -> Tensor:
        table, users = values["items.weight"], []
        for start, end in itertools.pairwise(histories.offsets.tolist()):
            items = histories.items[start : min(end, start + LONGEST)].to(device)
            users.append(tower(values, "user_tower", table[items].sum(0) / max(len(items), 1)))
        items = torch.stack([tower(values, "item_tower", table[item]) for item in chosen])
        log_q = None if probabilities is None else probabilities.to(table)[chosen].log()
        return losses_of(torch.stack(users), items, chosen, 0.5, log_q).mean()

    def expected(dtype: torch.dtype) -> list[Tensor]:
        leaves = {n: p.detach().to(dtype).requires_grad_() for n, p in parameters.items()}
        loss = formula(leaves)
        return [loss, *torch.autograd.grad(loss, list(leaves.values()))]

    loss = model(impressions)
    actual = [loss, *torch.autograd.grad(loss, list(parameters.values()))]
    exact, eager = expected(torch.float64), expected(torch.float32)
    # Gradients of unit vectors are differences of numbers up to 1 over the temperature, 2.
    for result, low, high in zip(actual, eager, exact, strict=True):
        assert_as_near(result, low, high, slack=relative_error(1) * 2)
    assert model.log_probabilities is None or model.log_probabilities.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_above_zero_is_an_error(temperature: float) -> None:
    items = torchembed.Embedding(3, 4)
    message = rf"^temperature must be above 0, got {temperature}$"
    with pytest.raises(ValueError, match=message):
        TwoTower(items, embedding_dim=4, max_length=2, temperature=temperature)
