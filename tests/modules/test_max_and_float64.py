"""``mode="max"`` and float64, beside ``torch.nn``'s modules with the same weight."""

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.bag_forms import FORMS, NUM_ROWS
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal

DIM = 6
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Below, the weights are whole numbers, so that every dtype adds them up exactly."""


def whole_numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (normal(*shape, seed=seed) * 4).round().to(dtype)


def run(
    kind: type[nn.Module], form: str, dtype: torch.dtype, device: torch.device, **settings: object
) -> tuple[Tensor, Tensor]:
    ids, offsets, include_last_offset = FORMS[form]
    module = kind(
        NUM_ROWS,
        DIM,
        include_last_offset=include_last_offset,
        _weight=whole_numbers(NUM_ROWS, DIM, seed=2, dtype=dtype).to(device),
        **settings,
    )
    output = module(ids.to(device), None if offsets is None else offsets.to(device))
    output.backward(whole_numbers(*output.shape, seed=3, dtype=dtype).to(device))
    return output.detach(), module.weight.grad.to_dense()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_maxima_are_torchs(
    padding_idx: int | None, form: str, dtype: torch.dtype, device: torch.device
) -> None:
    # Whole numbers of little size: many elements are the largest of their bag together.
    settings = {"mode": "max", "padding_idx": padding_idx}
    # On a GPU torch's maximum has no deterministic backward, which the tests require.
    expected = run(nn.EmbeddingBag, form, dtype, torch.device("cpu"), **settings)
    found = run(torchembed.EmbeddingBag, form, dtype, device, **settings)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_float64_bags_are_torchs(
    padding_idx: int | None, sparse: bool, mode: str, form: str, device: torch.device
) -> None:
    settings = {"mode": mode, "sparse": sparse, "padding_idx": padding_idx}
    expected = run(nn.EmbeddingBag, form, torch.float64, device, **settings)
    found = run(torchembed.EmbeddingBag, form, torch.float64, device, **settings)
    for ours, theirs in zip(found, expected, strict=True):
        # A mean's terms are divided, or multiplied by a rounded reciprocal; the order is free.
        largest = theirs.abs().max().item() if theirs.numel() else 0.0
        atol = 2 * FORMS[form][0].numel() * torch.finfo(torch.float64).eps * largest
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_float64_weights_of_ids(device: torch.device) -> None:
    ids, _, _ = FORMS["fixed"]
    grads, outputs = [], []
    for kind in (nn.EmbeddingBag, torchembed.EmbeddingBag):
        weight = whole_numbers(NUM_ROWS, DIM, seed=2, dtype=torch.float64).to(device)
        factors = whole_numbers(*ids.shape, seed=5, dtype=torch.float64).to(device)
        factors.requires_grad_()
        module = kind(NUM_ROWS, DIM, mode="sum", _weight=weight)
        output = module(ids.to(device), None, factors)
        output.sum().backward()
        outputs.append(output.detach())
        grads.append((module.weight.grad, factors.grad))
    assert_same_bits(outputs[1], outputs[0])
    for ours, theirs in zip(*reversed(grads), strict=True):
        assert_same_bits(ours, theirs)


def test_float64_embeddings_are_torchs(device: torch.device) -> None:
    results = []
    for kind in (nn.Embedding, torchembed.Embedding):
        weight = normal(NUM_ROWS, DIM, seed=2, dtype=torch.float64, device=device)
        module = kind(NUM_ROWS, DIM, padding_idx=3, _weight=weight)
        output = module(torch.tensor([[0, 3], [3, 1]], device=device))
        output.sum().backward()
        results.append((output.detach(), module.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


def test_a_table_without_rows_or_ids_beside_float64(device: torch.device) -> None:
    bag = torchembed.EmbeddingBag(3, 2, dtype=torch.float64, device=device)
    assert bag(torch.zeros(2, 0, dtype=torch.int64, device=device)).tolist() == [[0.0, 0.0]] * 2


def test_a_maximum_that_is_nan_stays(device: torch.device) -> None:
    weight = torch.tensor([[1.0], [float("nan")]], device=device)
    bag = torchembed.EmbeddingBag(2, 1, mode="max", _weight=weight)
    assert bag(torch.tensor([[0, 1]], device=device)).isnan().all()


def test_bad_ids_do_not_count_in_a_maximum(device: torch.device) -> None:
    weight = torch.tensor([[-1.0], [-2.0]], device=device)
    bag = torchembed.EmbeddingBag(2, 1, mode="max", _weight=weight, on_bad_id="zero")
    assert bag(torch.tensor([[7, 1], [9, 8]], device=device)).tolist() == [[-2.0], [0.0]]


@pytest.mark.usefixtures("fastest_algorithms")  # torch's maximum has no other backward on a GPU
def test_a_fused_optimizer_trains_a_maximum(device: torch.device) -> None:
    weight = whole_numbers(NUM_ROWS, DIM, seed=2, dtype=torch.float32).to(device)
    ours = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="max", _weight=weight.clone())
    theirs = nn.EmbeddingBag(NUM_ROWS, DIM, mode="max", _weight=weight.clone())
    optimizers = [
        torchembed.optim.SGD(ours.parameters(), lr=0.5),
        torch.optim.SGD(theirs.parameters(), lr=0.5),
    ]
    ids = torch.tensor([[0, 3, 3], [3, 1, 2]], device=device)
    for _ in range(3):
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            module(ids).sum().backward()
            optimizer.step()
    assert ours.weight.grad is None
    assert_same_bits(ours.weight.detach(), theirs.weight.detach())


def test_fused_optimizers_refuse_float64(device: torch.device) -> None:
    bag = torchembed.EmbeddingBag(3, 2, dtype=torch.float64, device=device)
    with pytest.raises(TypeError, match=r"table weight must be float32, .* for Adam, got torch.fl"):
        torchembed.optim.Adam(bag.parameters())
    bag(torch.zeros(1, 1, dtype=torch.int64, device=device)).sum().backward()
    assert bag.weight.grad is not None
    bag = torchembed.EmbeddingBag(3, 2, device=device)
    torchembed.optim.Adam(bag.parameters())
    bag.double()
    with pytest.raises(
        TypeError, match=r"tables weight must be float32, .* use one of torch.optim"
    ):
        bag(torch.zeros(1, 1, dtype=torch.int64, device=device))
