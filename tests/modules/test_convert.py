"""Modules of torch that become ours, in place and over the same weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import torchembed
from tests.support.tolerance import assert_same_bits

BAGS = torch.randint(20, (6, 7), generator=torch.Generator().manual_seed(0))
OFFSETS = torch.tensor([0, 0, 3, 11, 42])


class Model(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(20, 5, **settings), nn.ReLU()])
        self.inner = nn.Sequential(nn.Embedding(20, 5, padding_idx=-1), nn.Linear(5, 2))
        self.again = self.bags[0]
        self.frozen = nn.Embedding(20, 5).requires_grad_(False)
        self.frozen.eval()
        self.tied = nn.Linear(5, 20, bias=False)
        self.tied.weight = self.inner[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        pooled = self.bags[0](ids.flatten(), OFFSETS) if self.last else self.bags[0](ids)
        vectors = self.inner(ids).sum() + self.frozen(ids).sum()
        return self.tied(pooled).sum() + vectors

    @property
    def last(self) -> bool:
        return self.bags[0].include_last_offset


SETTINGS: list[dict[str, Any]] = [
    {},
    {"mode": "sum", "padding_idx": 3},
    {"mode": "mean", "padding_idx": 0, "include_last_offset": True},
    {"mode": "max", "dtype": torch.float64},
    {"mode": "sum", "sparse": True, "dtype": torch.float64, "include_last_offset": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_results_and_parameters_stay(settings: dict[str, Any]) -> None:
    model = Model(settings).to(settings.get("dtype", torch.float32))
    before = copy.deepcopy(model)
    parameters, addresses = dict(model.named_parameters()), storages(model)
    state = torch.get_rng_state()
    assert torchembed.convert(model) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model.bags[0]) is torchembed.EmbeddingBag and model.again is model.bags[0]
    assert type(model.inner[0]) is torchembed.Embedding and type(model.bags[1]) is nn.ReLU
    assert model.tied.weight is model.inner[0].weight
    assert not model.frozen.training and not model.frozen.weight.requires_grad
    after = dict(model.named_parameters())
    assert list(after) == list(parameters) and storages(model) == addresses
    assert all(after[name] is parameter for name, parameter in parameters.items())
    for name in ("mode", "padding_idx", "include_last_offset", "sparse"):
        assert getattr(model.bags[0], name) == getattr(before.bags[0], name)
    assert model.inner[0].padding_idx == 19
    assert_same_bits(model(BAGS), before(BAGS))
    arguments = (BAGS.flatten(), OFFSETS) if model.last else (BAGS,)
    assert_same_bits(model.bags[0](*arguments), before.bags[0](*arguments))
    assert_same_bits(model.frozen(BAGS), before.frozen(BAGS))
    for either in (model, before):
        either(BAGS).backward()
    for name, parameter in before.named_parameters():
        ours = after[name].grad
        assert (ours is None) == (parameter.grad is None), name
        if ours is not None:
            assert ours.is_sparse == parameter.grad.is_sparse, name
            # Sums over the ids of a batch, in another order.
            found, expected = ours.to_dense(), parameter.grad.to_dense()
            atol = BAGS.numel() * torch.finfo(found.dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def storages(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_optimizers_from_before_go_on(device: torch.device) -> None:
    models = [nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum"), nn.Linear(4, 1)).to(device)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.25) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 2 and model is models[0]:
                torchembed.convert(model)
            optimizer.zero_grad()
            model(BAGS[:, :1].to(device)).square().sum().backward()
            optimizer.step()
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_same_bits(found.detach(), expected.detach())


def test_our_optimizers_take_converted_tables_over() -> None:
    model = torchembed.convert(nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum"), nn.Flatten()))
    embeddings, rest = torchembed.split_parameters(model)
    assert embeddings == [model[0].weight] and not rest
    optimizer = torchembed.optim.SGD(embeddings, lr=0.5)
    before = model[0].weight.detach().clone()
    model(torch.tensor([[1, 1, 4]])).sum().backward()
    optimizer.step()
    expected = before.clone()
    expected[1] -= 1.0
    expected[4] -= 0.5
    assert_same_bits(model[0].weight.detach(), expected)


def test_tied_embeddings_stay_tied() -> None:
    model = nn.Sequential(nn.Embedding(20, 4), nn.EmbeddingBag(20, 4, mode="sum"))
    model[1].weight = model[0].weight
    expected = [module(BAGS).detach() for module in model]
    torchembed.convert(model)
    assert model[0].weight is model[1].weight
    for module, former in zip(model, expected, strict=True):
        assert_same_bits(module(BAGS).detach(), former)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        model[0].weight.zero_()
    sum(module(torch.tensor([[1]])).sum() for module in model).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert model[0].weight[1].tolist() == [-1.0] * 4
    fused = torchembed.optim.SGD(model.parameters(), lr=0.5)
    sum(module(torch.tensor([[1]])).sum() for module in model).backward()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="by a lookup of another module that shares it"):
        fused.step()


def test_rows_that_are_not_contiguous_are_laid_out_anew() -> None:
    model = nn.Sequential(nn.Embedding.from_pretrained(torch.randn(4, 20).T, freeze=False))
    weight = model[0].weight
    assert not weight.is_contiguous()
    expected = model(BAGS)
    torchembed.convert(model)
    assert model[0].weight is weight and weight.is_contiguous()
    assert_same_bits(model(BAGS), expected)


def with_complex_rows(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(5, 2, dtype=torch.complex64))


def with_parametrization(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[0], "weight", nn.ReLU(), unsafe=True)


HINDRANCES: list[tuple[Callable[[nn.Sequential], object], str]] = [
    (lambda m: setattr(m[0], "max_norm", 1.5), r"0: max_norm=1.5; nothing was converted"),
    (lambda m: setattr(m[0], "scale_grad_by_freq", True), r"0: scale_grad_by_freq=True"),
    (lambda m: m[0].register_buffer("scale", torch.ones(1)), r"0: it holds scale as well"),
    (with_complex_rows, r"0: its weight is torch.complex64"),
    (lambda m: m[0].register_forward_hook(print), r"0: hooks are registered on it; remove them"),
    (lambda m: prune.identity(m[0], "weight"), r"0: its weight is no parameter but comp"),
    (with_parametrization, r"0: its weight is no parameter but computed, as by a parametrization"),
]


@pytest.mark.parametrize(("harm", "message"), HINDRANCES)
def test_what_ours_have_not_is_named(harm: Callable[[nn.Sequential], object], message: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 2), nn.EmbeddingBag(5, 2, max_norm=2.0))
    harm(model)
    modules = list(model)
    with pytest.raises(ValueError, match=r"1: max_norm=2\.0; nothing was") as error:
        torchembed.convert(model)
    assert list(model) == modules
    model[1] = nn.ReLU()
    with pytest.raises(ValueError, match=message):
        torchembed.convert(model)
    assert str(error.value).startswith("model has embeddings that torchembed cannot replace: ")


def test_modules_of_derived_classes_stay() -> None:
    class Derived(nn.Embedding):
        pass

    model = nn.Sequential(Derived(5, 2), nn.Linear(5, 2))
    modules = list(model)
    assert list(torchembed.convert(model)) == modules
    assert list(torchembed.convert(torchembed.convert(model))) == modules


@pytest.mark.parametrize("model", [nn.Embedding(5, 2), nn.EmbeddingBag(5, 2)])
def test_an_embedding_itself_is_refused(model: nn.Module) -> None:
    name = type(model).__name__
    with pytest.raises(
        TypeError, match=rf"got one {name} itself; .*torchembed\.{name}\.from_pretr"
    ):
        torchembed.convert(model)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        torchembed.convert("model")  # type: ignore[arg-type]
