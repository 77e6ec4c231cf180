"""The sampled softmax and ``NextItem``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.packed_histories import packed_histories
from tests.support.tolerance import assert_follows
from tests.support.values import normal
from torchembed.models import Histories, NextItem, SASRec, sampled_softmax

NUM_ITEMS, DIM = 9, 4


def formula(query: Tensor, positive: Tensor, negatives: list[Tensor], temperature: float) -> Tensor:
    """The loss of one position, written out."""

    def exponential(vector: Tensor) -> Tensor:
        lengths = vector.square().sum().sqrt() * query.square().sum().sqrt()
        return ((query * vector).sum() / lengths / temperature).exp()

    wanted = exponential(positive)
    others = [exponential(vector) for vector in negatives]
    return -(wanted / sum(others, wanted)).log()


def test_sampled_softmax_follows_the_formula(device: torch.device) -> None:
    given = [
        normal(3, DIM, seed=1, device=device),
        normal(3, DIM, seed=2, device=device),
        normal(3, 5, DIM, seed=3, device=device),
    ]
    is_positive = torch.zeros(3, 5, dtype=torch.bool, device=device)
    is_positive[1, 2] = is_positive[1, 4] = True
    is_positive[2] = True
    leaves = [part.clone().requires_grad_() for part in given]
    losses = sampled_softmax(*leaves, is_positive, temperature=0.5)
    assert losses[2] == 0
    actual = [losses, *torch.autograd.grad(losses.sum(), leaves)]

    def expected(dtype: torch.dtype) -> list[Tensor]:
        exact = [part.to(dtype).requires_grad_() for part in given]
        found = []
        for q, p, ns, is_left_out in zip(*exact, is_positive.tolist(), strict=True):
            kept = [n for n, left_out in zip(ns, is_left_out, strict=True) if not left_out]
            found.append(formula(q, p, kept, 0.5))
        stacked = torch.stack(found)
        return [stacked, *torch.autograd.grad(stacked.sum(), exact)]

    for which, result in enumerate(actual):
        assert_follows(result, lambda dtype, which=which: expected(dtype)[which])


def model_of(device: torch.device, num_negatives: int = 3) -> NextItem:
    torch.manual_seed(0)
    items = torchembed.Embedding(NUM_ITEMS, DIM, device=device, seed=0)
    encoder = SASRec(items, embedding_dim=DIM, max_length=4, dropout=0.0, dense_device=device)
    return NextItem(encoder, num_items=NUM_ITEMS, num_negatives=num_negatives)


@pytest.fixture
def histories(device: torch.device) -> Histories:
    """One of four items, none, one of six, which is two too long, and two spare places."""
    packed = packed_histories([4, 0, 6], num_items=NUM_ITEMS, spare=2)
    return packed.mapped(lambda tensor: tensor.to(device))


def test_the_loss_is_the_mean_over_the_items_of_histories(
    histories: Histories, device: torch.device
) -> None:
    model = model_of(device)
    torch.manual_seed(3)
    loss = model(histories)
    torch.manual_seed(3)
    drawn = torch.randint(NUM_ITEMS, (12, 3), device=device)
    assert (drawn == histories.next_items.unsqueeze(1)).any()  # a negative that is left out

    def expected(dtype: torch.dtype) -> Tensor:
        encoded, table = model.encoder(histories).to(dtype), model.encoder.items.weight.to(dtype)
        losses = []
        for place in (*range(4), *range(4, 8)):
            wanted = int(histories.next_items[place])
            others = [table[item] for item in drawn[place].tolist() if item != wanted]
            losses.append(formula(encoded[place], table[wanted], others, 0.05))
        return torch.stack(losses).mean()

    assert_follows(loss, expected)


def test_a_batch_without_items_has_no_loss(device: torch.device) -> None:
    model = model_of(device)
    empty = packed_histories([0, 0], num_items=NUM_ITEMS, spare=3)
    loss = model(empty.mapped(lambda tensor: tensor.to(device)))
    loss.backward()
    assert loss == 0
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def test_users_are_where_their_histories_end(device: torch.device) -> None:
    model = model_of(device).eval()
    packed = packed_histories([4, 0, 2], num_items=NUM_ITEMS, spare=2)
    histories = packed.mapped(lambda tensor: tensor.to(device))
    users, items = model.user_vectors(histories), model.item_vectors()
    encoded: Callable[[int], Tensor] = lambda place: model.encoder(histories)[place]  # noqa: E731
    for user, place in ((0, 3), (2, 5)):
        assert_follows(
            users[user],
            lambda dtype, place=place: (v := encoded(place).to(dtype)) / v.square().sum().sqrt(),
        )
    assert not users[1].any()
    assert items.shape == (NUM_ITEMS, DIM)
    weight = model.encoder.items.weight
    assert_follows(
        items, lambda dtype: weight.to(dtype) / weight.to(dtype).square().sum(1, True).sqrt()
    )


def test_a_temperature_that_is_not_above_zero_is_an_error(device: torch.device) -> None:
    encoder = model_of(device).encoder
    with pytest.raises(ValueError, match=r"^temperature must be above 0, got 0$"):
        NextItem(encoder, num_items=3, temperature=0)
