"""Tables whose module holds another tensor than the rows: functional calls, parametrizations and
pruning."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import torchembed
from tests.support.three_tables import NAMES, features, make
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed import SparseFeatures

IDS = torch.tensor([[0, 3, 3], [2, 4, 0]])
NUM_ROWS, DIM = 5, 4


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def bags(device: torch.device, **settings: object) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's with one weight."""
    ours = torchembed.EmbeddingBag(NUM_ROWS, DIM, device=device, **settings)
    theirs = nn.EmbeddingBag(NUM_ROWS, DIM, device=device, **settings)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def vectors(module: nn.Module, device: torch.device) -> Tensor:
    return module(IDS.to(device))


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """Sums of three numbers whose order is one."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * torch.finfo(ours.dtype).eps * 3)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_functional_call_reads_the_given_weight(sparse: bool, device: torch.device) -> None:
    given = normal(NUM_ROWS, DIM, seed=1, device=device)
    results = []
    for module in bags(device, mode="sum", sparse=sparse):
        weight = given.clone().requires_grad_()
        result = functional_call(module, {"weight": weight}, (IDS.to(device),))
        result.sum().backward()
        assert module.weight.grad is None and weight.grad is not None
        results.append((result.detach(), weight.grad.to_dense()))
    for ours, theirs in zip(*results, strict=True):
        assert_equal(ours, theirs)


def test_an_embedding_reads_the_given_weight(device: torch.device) -> None:
    module = torchembed.Embedding(NUM_ROWS, DIM, padding_idx=3, device=device)
    given = normal(NUM_ROWS, DIM, seed=1, device=device).requires_grad_()
    found = functional_call(module, {"weight": given}, (IDS.to(device),))
    assert_same_bits(found, given.detach()[IDS.to(device)])
    found.sum().backward()
    assert given.grad is not None
    counts = torch.tensor([2.0, 0, 1, 0, 1], device=device)
    assert_same_bits(given.grad, counts.unsqueeze(1).expand(NUM_ROWS, DIM))
    assert_same_bits(vectors(module, device), module.weight.detach()[IDS.to(device)])


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_of_a_collection_may_be_given_some_or_all(
    sparse: bool, device: torch.device
) -> None:
    module = make(device)
    if sparse:
        tables = module.embedding_bag_configs()
        module = torchembed.EmbeddingBagCollection(tables, device=device, sparse=True)
    own = dict(module.named_parameters())
    for given_names in (NAMES, NAMES[1:2]):
        given = {
            name: torch.randn_like(weight).requires_grad_()
            for name, weight in own.items()
            if name.split(".")[1] in given_names
        }
        module.zero_grad()
        found = functional_call(module, given, (features(device),)).values()
        weights = [given.get(name, weight) for name, weight in own.items()]
        assert_same_bits(found, torch.cat([w.detach()[[0, 2]] for w in weights], dim=1))
        found.sum().backward()
        for name, weight in own.items():
            trained = given.get(name, weight)
            assert trained.grad is not None
            dense = trained.grad.to_dense()
            assert dense[[0, 2]].eq(1).all() and dense.sum() == 8
            assert (weight.grad is None) == (name in given)
    expected = torch.cat([w.detach()[[0, 2]] for w in own.values()], dim=1)
    assert_same_bits(module(features(device)).values(), expected)


def test_a_sequence_collection_reads_the_given_weight(device: torch.device) -> None:
    tables = [
        torchembed.EmbeddingConfig(
            name=name, num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=(name,)
        )
        for name in ("a", "b")
    ]
    module = torchembed.EmbeddingCollection(tables, device=device)
    given = normal(NUM_ROWS, DIM, seed=1, device=device)
    ids = torch.tensor([1, 4, 0, 2], device=device)
    batch = SparseFeatures(keys=("a", "b"), values=ids, batch_size=2, hotness=(1, 1))
    found = functional_call(module, {"embeddings.b.weight": given}, (batch,))
    assert_same_bits(found["b"].values(), given[[0, 2]])
    own = module.get_parameter("embeddings.a.weight").detach()
    assert_same_bits(found["a"].values().detach(), own[[1, 4]])


def test_a_given_weight_may_have_another_dtype(device: torch.device) -> None:
    module = torchembed.EmbeddingBag(NUM_ROWS, DIM, device=device)
    given = {"weight": module.weight.detach().bfloat16()}
    found = functional_call(module, given, (IDS.to(device),))
    assert_same_bits(found, vectors(module.bfloat16(), device).detach())


def test_a_given_weight_of_another_shape_is_named(device: torch.device) -> None:
    module = make(device)
    given = {"embedding_bags.b.weight": torch.zeros(2, 4, device=device)}
    with pytest.raises(ValueError, match=r"weight of table b must have shape \(5, 4\), got \(2, 4"):
        functional_call(module, given, (features(device),))


def fused(module: nn.Module) -> torchembed.optim.SGD:
    return torchembed.optim.SGD(module.parameters(), lr=1.0)


def test_given_weights_are_apart_from_a_fused_optimizer(device: torch.device) -> None:
    module = make(device)
    optimizer = fused(module)
    before = [weight.detach().clone() for weight in module.parameters()]
    given = {n: torch.randn_like(w).requires_grad_() for n, w in module.named_parameters()}
    functional_call(module, given, (features(device),)).values().sum().backward()
    optimizer.step()
    assert all(weight.grad is not None for weight in given.values())
    for weight, old in zip(module.parameters(), before, strict=True):
        assert_same_bits(weight.detach(), old)
    given.popitem()
    with pytest.raises(RuntimeError, match="updates others of them, c, in one pass with these"):
        functional_call(module, given, (features(device),))
    with torch.no_grad():
        functional_call(module, given, (features(device),))


def grad_of_sum(module: nn.Module, device: torch.device) -> Callable[..., Tensor]:
    def total(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(module, weights, (IDS.to(device),)).square().sum()

    return torch.func.grad(total)


@pytest.mark.usefixtures("fastest_algorithms")  # torch's maximum has no other backward on a GPU
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_transforms_see_through_a_lookup(mode: str, device: torch.device) -> None:
    ours, theirs = bags(device, mode=mode)
    weights = {"weight": normal(NUM_ROWS, DIM, seed=1, device=device)}
    grads = [grad_of_sum(module, device)(weights)["weight"] for module in (ours, theirs)]
    exact = {"weight": weights["weight"].double()}
    oracle = grad_of_sum(theirs.double(), device)(exact)["weight"]
    errors = [(grad - oracle).abs().max() for grad in grads]
    eps = torch.finfo(torch.float32).eps
    assert errors[0] <= 2 * errors[1] + eps * oracle.abs().max()


def test_an_ensemble_is_one_call(device: torch.device) -> None:
    models = [torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum", device=device) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return functional_call(base, (weights, buffers), (IDS.to(device),))

    found = torch.vmap(call)(weights, buffers)
    for result, model in zip(found, models, strict=True):
        assert_equal(result, vectors(model, device))


def test_a_fused_optimizer_refuses_transforms(device: torch.device) -> None:
    module = torchembed.EmbeddingBag(NUM_ROWS, DIM, device=device)
    fused(module)
    scale = torch.ones((), device=device)
    with pytest.raises(RuntimeError, match="cannot record gradients inside a transform"):
        torch.func.grad(lambda s: (s * vectors(module, device)).sum())(scale)


@pytest.mark.parametrize("is_collection", [False, True])
def test_a_parametrization_is_looked_up(is_collection: bool, device: torch.device) -> None:
    module = make(device) if is_collection else bags(device, mode="sum")[0]
    call = (lambda: module(features(device)).values()) if is_collection else None
    call = call or (lambda: vectors(module, device))
    before = call().detach()
    table = module.embedding_bags["b"] if is_collection else module
    parametrize.register_parametrization(table, "weight", Doubled())
    columns = slice(4, 8) if is_collection else slice(0, 4)
    expected = before.clone()
    expected[:, columns] *= 2
    assert_same_bits(call().detach(), expected)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    call().sum().backward()
    optimizer.step()
    original = table.parametrizations["weight"].original
    assert original.grad is not None and original.grad.count_nonzero() > 0
    after = call().detach()
    assert (after[:, columns] < expected[:, columns]).all()
    copied = copy.deepcopy(module)
    module.to(torch.float64).to(torch.float32)
    assert_same_bits(call().detach(), after)
    state = module.state_dict()
    copied.load_state_dict(state)
    parametrize.remove_parametrizations(table, "weight")
    assert_same_bits(call().detach(), after)


@pytest.mark.parametrize("is_collection", [False, True])
def test_a_pruned_table_is_looked_up(is_collection: bool, device: torch.device) -> None:
    module = make(device) if is_collection else bags(device, mode="sum")[0]
    call = (lambda: module(features(device)).values()) if is_collection else None
    call = call or (lambda: vectors(module, device))
    table = module.embedding_bags["b"] if is_collection else module
    columns = slice(4, 8) if is_collection else slice(0, 4)
    mask = torch.zeros_like(table.weight)
    mask[0] = 1
    prune.custom_from_mask(table, "weight", mask)
    expected = (table.weight_orig * mask)[[0, 2] if is_collection else IDS.to(device)].detach()
    expected = expected if is_collection else expected.sum(1)
    assert_equal(call().detach()[:, columns], expected)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(2):  # a graph of its own each time
        optimizer.zero_grad()
        call().sum().backward()
        optimizer.step()
    assert table.weight_orig.grad[0].count_nonzero() == 4
    assert table.weight_orig.grad[1:].count_nonzero() == 0
    after = call().detach()
    assert (after[:1, columns] < expected[:1]).all()
    prune.remove(table, "weight")
    assert_same_bits(call().detach(), after)


def test_a_fused_optimizer_names_a_parametrized_table(device: torch.device) -> None:
    module = bags(device, mode="sum")[0]
    parametrize.register_parametrization(module, "weight", Doubled())
    optimizer = fused(module)
    vectors(module, device).sum().backward()
    with pytest.raises(RuntimeError, match=r"such as .* a parametrization or pruning, by"):
        optimizer.step()
