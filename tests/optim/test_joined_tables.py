"""Tables of separate modules, which one pass updates, and train as each by itself would."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.tolerance import assert_same_bits
from torchembed.ops.pooled_lookup import fixed_gradient_map
from torchembed.ops.rowwise_update import rowwise_update
from torchembed.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from torchembed.tables import table_of

OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [SGD, Adagrad, RowwiseAdagrad, Adam]
NUM_ROWS = 7, 1, 12, 5
Modules = list[torchembed.EmbeddingBag | torchembed.Embedding]


def make(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Modules:
    """Modules that pool sums, means, maxima and nothing, with and without a padding row."""
    settings: list[dict[str, Any]] = [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "max"},
        {"mode": "mean", "padding_idx": 2},
    ]
    bags = [
        torchembed.EmbeddingBag(n, 4, seed=number, dtype=dtype, device=device, **of_one)
        for number, (n, of_one) in enumerate(zip(NUM_ROWS, settings, strict=True))
    ]
    vectors = torchembed.Embedding(9, 4, padding_idx=0, seed=9, dtype=dtype, device=device)
    return [*bags, vectors]


def weights(modules: Modules) -> list[Tensor]:
    return [module.weight for module in modules]


def are_joined(modules: Modules) -> list[bool]:
    tables = [table_of(weight) for weight in weights(modules)]
    return [table is not None and table.group.joined is not None for table in tables]


def loss_of(modules: Modules, step: int, skipped: Sequence[int] = ()) -> Tensor:
    """A loss that gives each occurrence of an id a gradient of its own."""
    generator = torch.Generator().manual_seed(step)
    total = torch.zeros((), device=modules[0].weight.device)
    for number, module in enumerate(modules):
        ids = torch.randint(module.num_embeddings, (3, 5), generator=generator)
        vectors = module(ids.to(module.weight.device)).float()
        factors = torch.randn(vectors.shape, generator=generator).to(vectors.device)
        if number not in skipped:
            total = total + (vectors * factors).sum()
    return total


def optimizers_apart(modules: Modules, kind: Any, **settings: Any) -> list[Any]:
    """An optimizer for each module, which join nothing."""
    return [kind(module.parameters(), **settings) for module in modules]


def train(
    modules: Modules, optimizers: Sequence[Any], skipped: Sequence[Sequence[int]] = ((),) * 4
) -> None:
    for step, of_step in enumerate(skipped):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(modules, step, of_step).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(modules: Modules, expected: Modules) -> None:
    for module, of_expected in zip(modules, expected, strict=True):
        assert_same_bits(module.weight, of_expected.weight)


def assert_equal_states(optimizer: Any, apart: Sequence[Any]) -> None:
    for number, of_one in enumerate(apart):
        found, wanted = optimizer.state_dict()["state"][number], of_one.state_dict()["state"][0]
        assert found.keys() == wanted.keys()
        for name, state in wanted.items():
            assert_same_bits(found[name], state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_separate_modules_train_as_by_themselves(
    kind: Any, dtype: torch.dtype, device: torch.device
) -> None:
    modules, expected = make(dtype, device), make(dtype, device)
    optimizer, apart = kind(weights(modules), lr=0.1), optimizers_apart(expected, kind, lr=0.1)
    train(modules, [optimizer])
    train(expected, apart)
    assert_equal(modules, expected)
    assert_equal_states(optimizer, apart)


def test_one_pass_updates_all(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []

    def noted(weight: Tensor, *arguments: Any, **others: Any) -> None:
        updates.append(weight.shape[0])
        rowwise_update(weight, *arguments, **others)

    monkeypatch.setattr("torchembed.optim.fused.rowwise_update", noted)
    modules = make()
    train(modules, [Adagrad(weights(modules), lr=0.1)])
    assert updates == [sum(NUM_ROWS) + 9] * 4


def test_maps_of_gradients_are_found_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def noted(rows: Tensor, **form: Any) -> tuple[Tensor, Tensor]:
        found.append((form["hotness"], form["batch_size"]))
        return fixed_gradient_map(rows, **form)

    monkeypatch.setattr("torchembed.modules.lookup.slots.fixed_gradient_map", noted)
    modules: Modules = [torchembed.EmbeddingBag(5, 4, seed=seed) for seed in range(3)]
    optimizer = Adagrad(weights(modules), lr=0.1)
    for _ in range(4):
        train(modules, [optimizer])
    assert found == [((5,), 3)] * 3
    with torch.no_grad():
        modules[0](torch.zeros(2, 2, dtype=torch.long))
    for num_samples in range(1, 9):
        modules[0](torch.zeros(num_samples, 2, dtype=torch.long)).sum().backward()
    assert found[3:] == [((2,), 1), ((2,), 2), ((2,), 3)]


def test_tables_that_differ_are_updated_apart() -> None:
    kinds = itertools.product((4, 8), (torch.float32, torch.half))
    modules: Modules = [torchembed.Embedding(5, dim, dtype=dtype) for dim, dtype in kinds]
    optimizer = Adagrad(weights(modules), lr=0.1)
    assert not any(are_joined(modules))
    train(modules, [optimizer])


@pytest.mark.parametrize("kind", [Adam, Adagrad])
def test_a_table_without_gradients_takes_no_step(kind: Any) -> None:
    """As each by itself: its count of steps stays, on which Adam's rates depend."""
    skipped = ((0, 1), (), (1,), (0, 2), (0,), ())
    modules, expected = make(), make()
    optimizer, apart = kind(weights(modules), lr=0.1), optimizers_apart(expected, kind, lr=0.1)
    train(modules, [optimizer], skipped)
    train(expected, apart, skipped)
    assert_equal(modules, expected)
    assert_equal_states(optimizer, apart)


def test_a_table_that_moves_is_updated_by_itself() -> None:
    modules, expected = make(), make()
    optimizer, apart = Adam(weights(modules), lr=0.1), optimizers_apart(expected, Adam, lr=0.1)
    for of_step in range(3):
        train(modules, [optimizer])
        train(expected, apart)
        moved = modules[of_step]
        if of_step == 0:
            moved.load_state_dict({"weight": moved.weight.detach().clone()}, assign=True)
            optimizer.param_groups[0]["params"][0] = moved.weight
        elif of_step == 1:
            moved.to(torch.float32).to("cpu").weight.data = moved.weight.detach().clone()
        else:
            moved.half().float()
            expected[of_step].half().float()
    train(modules, [optimizer])
    train(expected, apart)
    assert_equal(modules, expected)


def test_a_frozen_table_stays_as_it_is() -> None:
    modules = make()
    optimizer = Adagrad(weights(modules), lr=0.1)
    train(modules, [optimizer])
    modules[2].requires_grad_(False)
    before = [module.weight.detach().clone() for module in modules]
    train(modules, [optimizer])
    are_same = [torch.equal(m.weight, old) for m, old in zip(modules, before, strict=True)]
    assert are_same == [False, False, True, False, False]


def test_states_are_loaded_also_where_tables_have_done_different_steps() -> None:
    modules, expected = make(), make()
    apart = optimizers_apart(expected, Adam, lr=0.1)
    train(expected, apart, ((), (1,), (1, 2)))
    optimizer = Adam(weights(modules), lr=0.1)
    for module, of_expected in zip(modules, expected, strict=True):
        module.load_state_dict(of_expected.state_dict())
    states = [of_one.state_dict()["state"][0] for of_one in apart]
    assert [float(state["step"]) for state in states] == [3.0, 1.0, 2.0, 3.0, 3.0]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(states))})
    train(modules, [optimizer])
    train(expected, apart)
    assert_equal(modules, expected)
    assert_equal_states(optimizer, apart)


def test_copies_start_without_an_optimizer_and_train_alone() -> None:
    modules = make()
    optimizer = Adagrad(weights(modules), lr=0.1)
    copied = copy.deepcopy(modules)
    before = [module.weight.detach().clone() for module in copied]
    train(modules, [optimizer])
    assert all(torch.equal(m.weight, old) for m, old in zip(copied, before, strict=True))
    loss_of(copied, 0).backward()
    assert all(module.weight.grad is not None for module in copied)


def test_gradients_accumulate_and_are_discarded() -> None:
    modules, expected = make(), make()
    optimizer, apart = SGD(weights(modules), lr=0.1), optimizers_apart(expected, SGD, lr=0.1)
    for of_modules, of_optimizers in ((modules, [optimizer]), (expected, apart)):
        loss_of(of_modules, 0).backward()
        for of_one in of_optimizers:
            of_one.zero_grad()
        loss_of(of_modules, 1).backward()
        loss_of(of_modules, 2).backward()
        for of_one in of_optimizers:
            of_one.step()
    assert_equal(modules, expected)


def test_no_memory_leaves_tables_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError

    modules, expected = make(), make()
    monkeypatch.setattr(Tensor, "new_empty", fails)
    optimizer = Adagrad(weights(modules), lr=0.1)
    monkeypatch.undo()
    assert not any(are_joined(modules))
    apart = optimizers_apart(expected, Adagrad, lr=0.1)
    train(modules, [optimizer])
    train(expected, apart)
    assert_equal(modules, expected)
