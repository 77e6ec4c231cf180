"""``weight.grad`` of fused tables under torch's own habits, beside torch's modules."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
import torchembed.optim
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.twins import (
    NAMES,
    NUM_STEPS,
    TorchTwin,
    assert_trains_as,
    backward,
    make,
    rows,
    weight,
)
from torchembed.optim import SGD
from torchembed.tables import TableGradient, table_of


def nested(module: nn.Module) -> nn.Module:
    """``module`` two levels down."""
    return nn.Sequential(nn.Sequential(module), nn.Identity())


def none_of_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARS: dict[str, Callable[[nn.Module], None]] = {
    "zero_grad of the module": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "None for each": none_of_each,
}


def trained(
    optimizer_kind: Any, habit: Callable[[nn.Module], object], *, is_applied: bool = True
) -> Callable[[nn.Module], None]:
    """Training where ``habit`` comes between two backwards and the step, or after the first one and
    before a second."""

    def train(module: nn.Module) -> None:
        model = nested(module)
        optimizer = optimizer_kind(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            model.zero_grad()
            backward(module, step)
            if is_applied:
                backward(module, step + 10)
                habit(model)
            else:
                habit(model)
                backward(module, step + 10)
            optimizer.step()

    return train


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS.keys())
def test_cleared_gradients_are_not_applied(
    clear: Callable[[nn.Module], None], device: torch.device
) -> None:
    module = make(device)
    optimizer, before = SGD(module.parameters(), lr=0.1), rows(module)
    backward(module, 0)
    clear(nested(module))
    optimizer.step()
    for name in NAMES:
        assert_same_bits(weight(module, name), before[name])
    train = [trained(kind, clear, is_applied=False) for kind in (SGD, torch.optim.SGD)]
    assert_trains_as(make(device), *train)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_one_table_alone_is_cleared(set_to_none: bool, device: torch.device) -> None:
    def clear(model: nn.Module) -> None:
        bag = weight(model[0][0], "a")  # type: ignore[index]
        if set_to_none:
            bag.grad = None
        else:
            bag.grad.zero_()  # type: ignore[union-attr]

    train = [trained(kind, clear, is_applied=False) for kind in (SGD, torch.optim.SGD)]
    assert_trains_as(make(device), *train)


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


def drop_what_is_not_finite(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.nan_to_num_(0.0, 0.0, 0.0)


HABITS: dict[str, Callable[[nn.Module], object]] = {
    "values": clip_values,
    "halves": halve,
    "finite": drop_what_is_not_finite,
    **{
        f"norm {order}": lambda model, order=order: torch.nn.utils.clip_grad_norm_(
            model.parameters(), 0.5, order
        )
        for order in (2.0, 1.0, 3.0, float("inf"))
    },
    "twice": lambda model: [
        torch.nn.utils.clip_grad_norm_(model.parameters(), bound) for bound in (3.0, 1.0)
    ],
}


@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS.keys())
def test_changed_gradients_are_applied(
    habit: Callable[[nn.Module], object], device: torch.device
) -> None:
    train = [trained(kind, habit) for kind in (SGD, torch.optim.SGD)]
    assert_trains_as(make(device), *train)


def test_both_kinds_are_clipped_by_one_norm(device: torch.device) -> None:
    def train_with(kind: Any) -> Callable[[nn.Module], None]:
        def train(module: nn.Module) -> None:
            first, *others = module.parameters()
            optimizers = [torch.optim.SGD([first], lr=0.1), kind(others, lr=0.1)]
            backward(module, 0)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()

        return train

    assert_trains_as(make(device), train_with(SGD), train_with(torch.optim.SGD))


READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "norm": lambda grad: grad.detach().norm(),
    "norm of data": lambda grad: grad.data.norm(2),
    "least": lambda grad: torch.linalg.vector_norm(grad, -float("inf")),
    "mean": lambda grad: grad.abs().mean(),
    "by column": lambda grad: torch.linalg.vector_norm(grad, dim=0),
    "row": lambda grad: grad[1] + 1,
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read(
    reading: Callable[[Tensor], Tensor], name: str, device: torch.device
) -> None:
    def read(module: nn.Module) -> Tensor:
        for step in range(2):
            backward(module, step)
        grad = weight(module, name).grad
        assert grad is not None
        return reading(grad)

    module = make(device)
    optimizer = SGD(module.parameters())
    assert_follows(read(module), lambda dtype: read(TorchTwin(dtype)))
    # Reading changes nothing.
    other = make(device)
    for_other = SGD(other.parameters())
    for step in range(2):
        backward(other, step)
    for_other.step()
    grad = weight(module, name).grad
    optimizer.step()
    for each in NAMES:
        assert_same_bits(weight(module, each), weight(other, each))
    assert grad is not None
    assert not grad.count_nonzero()
    assert "TableGradient" in repr(grad)


def test_what_cannot_be_recorded_is_refused(device: torch.device) -> None:
    module = make(device)
    SGD(module.parameters())
    backward(module, 0)
    grad: Any = weight(module, "a").grad
    with pytest.raises(RuntimeError, match=r"cannot take aten\.add_.*; it can be scaled"):
        grad += 1
    with pytest.raises(RuntimeError, match="can be multiplied by one number alone"):
        grad *= torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="can be divided by one number alone"):
        grad /= torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="clamped to bounds around 0"):
        grad.clamp_(0.5, 1.0)
    module._tables[0].is_sharded = True
    with pytest.raises(RuntimeError, match=r"table a is sharded, .* TrainPipeline\(max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def test_torchs_clipping_is_refused_for_tables_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict", reason="tables on disk are kept by rocksdict")
    storage = torchembed.Disk(path=tmp_path, host_rows=8, cache_rows=2)
    model = nn.Sequential(torchembed.EmbeddingBag(8, 4, storage=storage), nn.Linear(4, 1))
    optimizer = SGD.with_dense(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2]])).sum().backward()
    parameters = list(model.parameters())[::-1]  # dense ones would be clipped first
    before = [None if p.is_meta else p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    with pytest.raises(
        RuntimeError, match=r"table weight is on disk, .* torchembed\.optim\.clip_grad_norm_, or"
    ):
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    for parameter, kept in zip(parameters, before, strict=True):
        if kept is not None:
            assert_same_bits(parameter.grad, kept)
    assert torchembed.optim.clip_grad_norm_(parameters, 0.1) > 0.1
    optimizer.step()


def test_moved_and_cast_tables_keep_what_is_recorded(device: torch.device) -> None:
    module, expected = make(device), make(device)
    for each in (module, expected):
        optimizer = SGD(each.parameters(), lr=0.1)
        backward(each, 0)
        if each is module:
            each.to(torch.bfloat16)
            assert weight(each, "a").grad.dtype == torch.bfloat16  # type: ignore[union-attr]
            each.float()
        else:
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.copy_(parameter.bfloat16())
        optimizer.step()
    for name in NAMES:
        assert_same_bits(weight(module, name), weight(expected, name))


def test_it_does_not_keep_its_table(device: torch.device) -> None:
    module = make(device)
    SGD(module.parameters())
    backward(module, 0)
    held, grad = weakref.ref(module), weight(module, "a").grad
    assert isinstance(grad, TableGradient)
    del module
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match="of a table whose module is gone"):
        grad.clone()


def test_a_module_of_one_table(device: torch.device) -> None:
    bag = torchembed.EmbeddingBag(5, 3, device=device)
    optimizer, before = SGD([bag.weight], lr=1.0), bag.weight.detach().clone()
    ids = torch.tensor([[1, 1, 2]], device=device)
    bag(ids).sum().backward()
    bag.zero_grad()
    optimizer.step()
    assert_same_bits(bag.weight, before)


class Separate(nn.Module):
    """Four tables of modules of their own, ours or torch's."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """``dtype``: of torch's modules; None for ours."""
        super().__init__()
        ours = [torchembed.EmbeddingBag(n, 4, seed=n, device=device) for n in (7, 5, 9, 6)]
        theirs = [
            nn.EmbeddingBag.from_pretrained(
                bag.weight.detach().cpu().to(dtype or torch.float32, copy=True), freeze=False
            )
            for bag in ours
        ]
        self.each: list[Any] = list(ours if dtype is None else theirs)
        self.bags = nn.ModuleList(self.each)

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for bag in self.each:
            ids = torch.randint(5, (3, 4), generator=generator).to(bag.weight.device)
            factors = torch.randn(3, 4, generator=generator)
            (bag(ids) * factors.to(bag.weight)).sum().backward()

    def record_together(self) -> None:
        """Let the recorded gradients be those of one lookup of all tables."""
        tables = [table_of(bag.weight) for bag in self.each]
        joined = None if tables[0] is None else tables[0].group.joined
        assert joined is not None
        merged = joined.merged_pending()
        assert merged is not None
        joined.clear_pending()
        joined.record_of(joined.members, merged.rows, merged.gradients, None)

    def flat(self) -> Tensor:
        return torch.cat([bag.weight.detach().flatten() for bag in self.each])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "habit",
    [*HABITS.values(), lambda model: torchembed.optim.clip_grad_norm_(model.parameters(), 0.5)],
    ids=[*HABITS.keys(), "our norm"],
)
def test_separate_modules_that_are_updated_in_one_pass(
    habit: Callable[[nn.Module], object], together: bool, device: torch.device
) -> None:
    def train(model: Separate, kind: Any) -> Tensor:
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            model.zero_grad()
            for number in range(2):
                model.backward(2 * step + number)
                if together and kind is SGD and number == 0:
                    model.record_together()
            if step == 2:
                model.each[1].zero_grad()
            if step == 3:
                model.zero_grad()
            habit(model) if step != 3 else None
            optimizer.step()
        return model.flat()

    assert_follows(
        train(Separate(device), SGD),
        lambda dtype: train(Separate(torch.device("cpu"), dtype), torch.optim.SGD),
    )
