"""Fused optimizers beside torch's, and torch's over our tables, on the same tables and batches."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed.optim
from tests.support import oracle
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.twins import (
    NUM_STEPS,
    assert_trains_as,
    backward,
    batch,
    make,
    output_gradient,
    rows,
    steps,
    weight,
    weights,
)

Settings = dict[str, Any]
SPARSE_ADAM_SETTINGS: list[Settings] = [
    {"lr": 0.1},
    {"lr": 0.01, "betas": (0.5, 0.7), "eps": 1e-3},
]
ADAGRAD_SETTINGS: list[Settings] = [
    {"lr": 0.1},
    {"lr": 0.5, "lr_decay": 0.3, "initial_accumulator_value": 0.7, "eps": 1e-2},
]


def torch_sparse_adam(parameters: Iterable[nn.Parameter], **settings: Any) -> Any:
    # SparseAdam takes no generator.
    return torch.optim.SparseAdam(list(parameters), **settings)


def test_sgd(device: torch.device) -> None:
    assert_trains_as(
        make(device),
        steps(lambda p: torchembed.optim.SGD(p, lr=0.1)),
        steps(lambda p: torch.optim.SGD(p, lr=0.1)),
    )


@pytest.mark.parametrize("settings", ADAGRAD_SETTINGS)
def test_adagrad(settings: Settings, device: torch.device) -> None:
    assert_trains_as(
        make(device),
        steps(lambda p: torchembed.optim.Adagrad(p, **settings)),
        steps(lambda p: torch.optim.Adagrad(p, **settings)),
    )


@pytest.mark.parametrize("settings", SPARSE_ADAM_SETTINGS)
def test_adam_is_torchs_sparse_adam(settings: Settings, device: torch.device) -> None:
    assert_trains_as(
        make(device),
        steps(lambda p: torchembed.optim.Adam(p, **settings)),
        steps(lambda p: torch_sparse_adam(p, **settings)),
        sparse=True,
    )


@pytest.mark.parametrize(
    "settings", [{}, {"lr_decay": 0.3, "initial_accumulator_value": 0.7, "eps": 1e-2}]
)
def test_rowwise_adagrad_has_one_sum_a_row(settings: Settings, device: torch.device) -> None:
    module = make(device)
    before = rows(module)
    optimizer = torchembed.optim.RowwiseAdagrad(module.parameters(), lr=0.1, **settings)
    for step in range(NUM_STEPS):
        backward(module, step)
        optimizer.step()
    columns = {"a": slice(0, 4), "b": slice(4, 8), "c": slice(8, 11)}

    def formula(dtype: torch.dtype, name: str, result: str) -> Tensor:
        twin = oracle.RowwiseOptimizer(
            before[name], "rowwise_adagrad", dtype, eps=settings.get("eps", 1e-10)
        )
        twin.states[0].fill_(settings.get("initial_accumulator_value", 0.0))
        for step in range(NUM_STEPS):
            bags = list(enumerate(batch(step).bags[name]))
            ids = torch.tensor([i for _, bag in bags for i in bag])
            gradients = output_gradient(step)[[sample for sample, bag in bags for _ in bag]]
            lr = 0.1 / (1 + step * settings.get("lr_decay", 0.0))
            twin.step(ids, gradients[:, columns[name]], lr, step + 1)
        return twin.weight if result == "weight" else twin.states[0]

    for name, parameter in weights(module).items():
        state = optimizer.state[parameter]["sum"]
        assert state.shape == (parameter.shape[0],)
        assert_follows(parameter, lambda dtype, name=name: formula(dtype, name, "weight"))
        assert_follows(state, lambda dtype, name=name: formula(dtype, name, "sum"))


@pytest.mark.parametrize(
    ("make_optimizer", "sparse"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), False),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
        (lambda p: torch.optim.Adam(p, lr=0.1), False),
        (lambda p: torch_sparse_adam(p, lr=0.1), True),
    ],
)
def test_torchs_optimizers_train_our_tables(
    make_optimizer: Callable[[Iterable[Any]], Any], sparse: bool, device: torch.device
) -> None:
    train = steps(make_optimizer)
    assert_trains_as(make(device, sparse=sparse), train, train, sparse=sparse)


# With eps 0 the two Adams of torch are one formula; only the dense one takes weight decay.
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("SGD", {}), ("Adagrad", {}), ("Adam", {"eps": 0.0})],
)
def test_weight_decay(kind: str, settings: Settings, device: torch.device) -> None:
    settings = {"lr": 0.1, "weight_decay": 0.5, **settings}
    assert_trains_as(
        make(device),
        steps(lambda p: getattr(torchembed.optim, kind)(p, **settings), every_row=True),
        steps(lambda p: getattr(torch.optim, kind)(p, **settings), every_row=True),
    )


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "Adam"])
def test_rows_that_are_not_touched_stay(kind: str, device: torch.device) -> None:
    module = make(device)
    optimizer = getattr(torchembed.optim, kind)(module.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        before = rows(module)
        backward(module, step)
        optimizer.step()
        for name, parameter in weights(module).items():
            ids = {i for bag in batch(step).bags[name] for i in bag}
            for row in range(parameter.shape[0]):
                assert torch.equal(parameter[row], before[name][row]) == (row not in ids)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_max_gradient_clamps_the_sum_of_a_row(kind: str, device: torch.device) -> None:
    def train_theirs(module: nn.Module) -> None:
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(module, step)
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.75)
            optimizer.step()

    assert_trains_as(
        make(device),
        steps(lambda p: getattr(torchembed.optim, kind)(p, lr=0.1, max_gradient=0.75)),
        train_theirs,
    )


def in_two_groups(kind: Callable[..., Any]) -> Callable[[Iterable[nn.Parameter]], Any]:
    """An optimizer with other settings for the second table."""

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Any:
        first, second, third = parameters
        return kind([{"params": [first, third]}, {"params": [second], "lr": 0.7}], lr=0.05)

    return make_optimizer


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_param_groups(kind: str, device: torch.device) -> None:
    assert_trains_as(
        make(device),
        steps(in_two_groups(getattr(torchembed.optim, kind))),
        steps(in_two_groups(getattr(torch.optim, kind))),
    )


def test_hyperparameters_may_change_between_steps(device: torch.device) -> None:
    def training(kind: Callable[..., Any]) -> Callable[[nn.Module], None]:
        def train(module: nn.Module) -> None:
            optimizer = kind(module.parameters(), lr=0.1)
            for step in range(NUM_STEPS):
                group = optimizer.param_groups[0]
                group["lr"], group["weight_decay"] = 0.1 * step, 0.2 * step
                optimizer.zero_grad()
                backward(module, step, every_row=True)
                optimizer.step()

        return train

    assert_trains_as(make(device), training(torchembed.optim.SGD), training(torch.optim.SGD))


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=NUM_STEPS, cycle_momentum=False
    ),
]


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
def test_learning_rate_schedulers(
    make_scheduler: Callable[[Any], Any], tensor_lr: bool, device: torch.device
) -> None:
    def training(kind: Callable[..., Any], lr: Any) -> Callable[[nn.Module], None]:
        def train(module: nn.Module) -> None:
            optimizer = kind(module.parameters(), lr=lr)
            scheduler = make_scheduler(optimizer)
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                backward(module, step)
                optimizer.step()
                scheduler.step()
            assert isinstance(optimizer.param_groups[0]["lr"], type(lr))

        return train

    lr = torch.tensor(0.1, device=device) if tensor_lr else 0.1
    assert_trains_as(
        make(device), training(torchembed.optim.SGD, lr), training(torch.optim.SGD, 0.1)
    )


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_gradients_accumulate_until_a_step(kind: str, device: torch.device) -> None:
    def training(library: Any) -> Callable[[nn.Module], None]:
        def train(module: nn.Module) -> None:
            optimizer = getattr(library, kind)(module.parameters(), lr=0.1)
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                for part in range(step % 3 + 1):
                    backward(module, 10 * step + part)
                optimizer.step()

        return train

    assert_trains_as(make(device), training(torchembed.optim), training(torch.optim))


def test_a_module_may_be_called_twice_before_backward(device: torch.device) -> None:
    def training(library: Any) -> Callable[[nn.Module], None]:
        def train(module: nn.Module) -> None:
            optimizer = library.SGD(module.parameters(), lr=0.1)
            place = next(module.parameters()).device
            first, second = (module(batch(step).jagged(place)).values() for step in (0, 1))
            (first * second).sum().backward()
            optimizer.step()

        return train

    assert_trains_as(make(device), training(torchembed.optim), training(torch.optim))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "Adam"])
def test_a_step_without_gradients_does_nothing(kind: str, device: torch.device) -> None:
    module = make(device)
    optimizer = getattr(torchembed.optim, kind)(module.parameters(), lr=0.1)
    backward(module, 0)
    optimizer.step()
    before, state = rows(module), optimizer.state_dict()["state"]
    state = {key: value.clone() for entry in state.values() for key, value in entry.items()}
    optimizer.step()
    backward(module, 1)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    with torch.no_grad():
        module(batch(2).jagged(device))
    optimizer.step()
    for name, parameter in weights(module).items():
        assert_same_bits(parameter, before[name])
    after = optimizer.state_dict()["state"]
    for key, value in {k: v for entry in after.values() for k, v in entry.items()}.items():
        assert_same_bits(value, state[key])


def test_a_closure_is_called(device: torch.device) -> None:
    module, expected = make(device), make(device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)

    def closure() -> str:
        backward(module, 0)
        return "loss"

    with torch.no_grad():
        assert optimizer.step(closure) == "loss"
    twin = torchembed.optim.SGD(expected.parameters(), lr=0.1)
    backward(expected, 0)
    twin.step()
    for name, parameter in weights(module).items():
        assert_same_bits(parameter, weight(expected, name))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "Adam"])
def test_results_do_not_depend_on_groups(kind: str, device: torch.device) -> None:
    # Bit for bit, stochastic rounding included: one parameter group, or one for each table.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        together, apart = make(device, dtype), make(device, dtype)
        make_optimizer = functools.partial(getattr(torchembed.optim, kind), lr=0.1)
        steps(make_optimizer)(together)
        steps(lambda p, make=make_optimizer: make([{"params": q} for q in p]))(apart)
        assert len(together._table_set.groups) == 2 and len(apart._table_set.groups) == 3
        for name, parameter in weights(together).items():
            assert_same_bits(parameter, weight(apart, name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "Adam"])
def test_state_of_16_bit_tables_is_float32(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    module = make(device, dtype)
    optimizer = getattr(torchembed.optim, kind)(module.parameters(), lr=0.1)
    backward(module, 0)
    optimizer.step()
    for parameter, state in optimizer.state.items():
        assert parameter.dtype == dtype
        assert all(value.dtype == torch.float32 for value in state.values())
