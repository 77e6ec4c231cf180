"""The optimizers of dense parameters against torch's, and what is theirs alone: flat memory."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.tolerance import assert_as_near, assert_follows, assert_same_bits
from tests.support.values import normal, whole
from torchembed import EmbeddingBag
from torchembed.autograd.gradient_slots import slot_of
from torchembed.modules import MLP
from torchembed.optim import DenseAdagrad, DenseAdam, DenseSGD

PAIRS = {
    "SGD": (DenseSGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "Adagrad": (DenseAdagrad, torch.optim.Adagrad, {"eps": 1e-3}),
    "Adagrad with decays": (
        DenseAdagrad,
        torch.optim.Adagrad,
        {"lr_decay": 0.5, "weight_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3},
    ),
    "Adam": (DenseAdam, torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 1e-3}),
}
each_pair = pytest.mark.parametrize(("ours", "theirs", "arguments"), PAIRS.values(), ids=PAIRS)


def model(device: torch.device | str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of ours and torch's, always with the same values."""
    layers = nn.Sequential(MLP(5, [7, 4]), nn.Linear(4, 3)).to(device, dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(layers.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 2)
    return layers


def backward(module: nn.Module, step: int, scale: float = 1.0) -> None:
    parameter = next(module.parameters())
    x = normal(6, 5, seed=50 + step, dtype=parameter.dtype, device=parameter.device)
    (scale * module(x).float().square().sum()).backward()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()


@each_pair
def test_trains_as_torchs(
    ours: Any, theirs: Any, arguments: dict[str, Any], device: torch.device
) -> None:
    def values(module: nn.Module) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    def formula(dtype: torch.dtype) -> Tensor:
        module = model("cpu", torch.float64).to(dtype)
        train(module, theirs(module.parameters(), lr=0.1, **arguments), range(4))
        return values(module)

    trained = model(device)
    train(trained, ours(trained.parameters(), lr=0.1, **arguments), range(4))
    assert_follows(values(trained), formula)


@each_pair
def test_a_step_may_update_some_parameters_early(
    ours: Any, theirs: Any, arguments: dict[str, Any], device: torch.device
) -> None:
    plain, early = model(device), model(device)
    optimizers = [ours(module.parameters(), lr=0.1, **arguments) for module in (plain, early)]
    for step in range(3):
        for module, optimizer in zip((plain, early), optimizers, strict=True):
            optimizer.zero_grad()
            backward(module, step)
        optimizers[1].step_early([early[0][2].weight])
        optimizers[1].step_early([early[1].bias, early[0][0].bias, early[0][2].weight])
        if step == 1:  # none is early that is not asked for
            assert torch.equal(early[1].weight, plain[1].weight)
        for optimizer in optimizers:
            optimizer.step()
        for parameter, expected in zip(early.parameters(), plain.parameters(), strict=True):
            assert_same_bits(parameter, expected)
    for entry, expected in zip(*(o.state.values() for o in optimizers), strict=True):
        assert {name: value.tolist() for name, value in entry.items()} == {
            name: value.tolist() for name, value in expected.items()
        }
    # The next step begins with the gradients that come after this.
    optimizers[1].step_early([early[1].bias])
    optimizers[1].zero_grad()
    backward(early, 3)
    before = early[1].bias.clone()
    optimizers[1].step()
    assert not torch.equal(early[1].bias, before)


@each_pair
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_are_rounded_masters(
    ours: Any, theirs: Any, arguments: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    trained, eager, exact = model(device), model(device), model(device).double()
    optimizer = ours(trained.parameters(), lr=0.01, dtype=dtype, **arguments)
    torchs = [theirs(module.parameters(), lr=0.01, **arguments) for module in (eager, exact)]
    parameters = [list(module.parameters()) for module in (trained, eager, exact)]
    assert {parameter.dtype for parameter in trained.parameters()} == {dtype}
    for step in range(3):
        optimizer.zero_grad()
        backward(trained, step)
        # Torch's steps are on the same gradients.
        for parameter, *masters in zip(
            *(m.parameters() for m in (trained, eager, exact)), strict=True
        ):
            assert parameter.grad is not None
            for master in masters:
                master.grad = parameter.grad.to(master.dtype)
        optimizer.step()
        for of_torch in torchs:
            of_torch.step()
    for parameter, *masters in zip(*parameters, strict=True):
        own = optimizer.state[parameter]["master"]
        assert_as_near(own, *masters)
        assert_same_bits(parameter.detach(), own.to(dtype))


def test_values_and_gradients_are_one_piece_of_memory(device: torch.device) -> None:
    module = model(device)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = DenseAdagrad(module.parameters(), dtype=torch.bfloat16)
    (flat,) = optimizer.flat_parameters()
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert 0 <= parameter.data_ptr() - flat.values.data_ptr() < flat.values.nbytes
        assert parameter.data_ptr() % 256 == flat.values.data_ptr() % 256
        assert_same_bits(parameter.detach(), value.bfloat16())
        assert_same_bits(optimizer.state[parameter]["master"], value)
    for _ in range(2):
        module.zero_grad()
        backward(module, 0)
        in_place = [slot_of(p).holds(p.grad) for p in module.parameters()]
        # Our layers write there; torch's gradients are copied by the step.
        assert in_place == [True] * 4 + [False] * 2
        optimizer.step()
        assert all(slot_of(p).holds(p.grad) for p in module.parameters())
    assert flat.gradients.count_nonzero() > 0


def test_gradients_accumulate(device: torch.device) -> None:
    once, twice, exact = model(device), model(device), model(device).double()
    optimizers = [DenseSGD(module.parameters(), lr=0.1) for module in (once, twice)]
    optimizers.append(torch.optim.SGD(exact.parameters(), lr=0.1))
    for module, scales in ((once, [2.0]), (twice, [1.0, 1.0]), (exact, [2.0])):
        for scale in scales:
            backward(module, 0, scale)
    for optimizer in optimizers:
        optimizer.step()
    trained = zip(twice.parameters(), once.parameters(), exact.parameters(), strict=True)
    for parameter, eager, true in trained:
        assert_as_near(parameter, eager, true)


def test_backward_through_values_before_the_step_is_an_error(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD(module.parameters(), lr=0.1)
    loss = module(normal(6, 5, seed=0, device=device)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_a_weight_may_be_used_twice(device: torch.device) -> None:
    shared, expected = MLP(4, [4], device=device), MLP(4, [4], device=device)
    with torch.no_grad():
        for seed, parameter in enumerate(shared.parameters()):
            parameter.copy_(whole(*parameter.shape, seed=seed))
    expected.load_state_dict(shared.state_dict())
    optimizer = DenseSGD(shared.parameters(), lr=0.1)
    x = whole(3, 4, seed=0, device=device)
    shared(shared(x)).sum().backward()
    expected(expected(x)).sum().backward()
    for parameter, other in zip(shared.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    optimizer.step()


def test_parameters_without_a_gradient_stay(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseAdam(module.parameters(), lr=0.1, weight_decay=0.5)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.step()
    assert optimizer.state[next(module.parameters())]["step"].item() == 0
    backward(module, 0)
    skipped = (1, 4)
    for number, parameter in enumerate(module.parameters()):
        if number in skipped:
            parameter.grad = None
    optimizer.step()
    for number, parameter in enumerate(module.parameters()):
        assert torch.equal(parameter, before[number]) == (number in skipped)


@each_pair
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_resumed_run_goes_on_bit_by_bit(
    ours: Any,
    theirs: Any,
    arguments: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    def start() -> tuple[nn.Module, Any]:
        module = model(device)
        return module, ours(module.parameters(), lr=0.1, dtype=dtype, **arguments)

    whole, optimizer = start()
    train(whole, optimizer, range(2))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, range(2, 4))
    for optimizer_first in (False, True):
        resumed, other = start()
        if optimizer_first:
            other.load_state_dict(saved[1])
        resumed.load_state_dict(saved[0])
        if not optimizer_first:
            other.load_state_dict(saved[1])
        train(resumed, other, range(2, 4))
        for parameter, same in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert_same_bits(parameter, same)


@pytest.mark.parametrize("name", ["Adagrad", "Adagrad with decays", "Adam"])
def test_state_goes_to_torchs_and_back(name: str, device: torch.device) -> None:
    ours, theirs, arguments = PAIRS[name]
    module, twin, exact = model(device), model(device), model(device).double()
    optimizer = ours(module.parameters(), lr=0.1, **arguments)
    torchs = theirs(twin.parameters(), lr=0.1, **arguments)
    train(exact, theirs(exact.parameters(), lr=0.1, **arguments), range(4))
    train(module, optimizer, range(2))
    twin.load_state_dict(module.state_dict())
    # Torch's own loading makes no copy.
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, torchs, range(2, 3))
    train(module, optimizer, range(2, 3))
    module.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(torchs.state_dict())
    train(twin, torchs, range(3, 4))
    train(module, optimizer, range(3, 4))
    trained = zip(module.parameters(), twin.parameters(), exact.parameters(), strict=True)
    for parameter, eager, true in trained:
        assert_as_near(parameter, eager, true)


def test_frozen_parameters_stay_until_they_are_freed(device: torch.device) -> None:
    module, expected, exact = model(device), model(device), model(device).double()
    for layers in (module, expected, exact):
        layers[0].requires_grad_(False)
    optimizer = DenseAdagrad(module.parameters(), lr=0.1)
    torchs, of_exact = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (expected, exact))
    frozen = [parameter.requires_grad for parameter in module.parameters()]
    assert frozen == [False] * 4 + [True] * 2
    for step in range(4):
        if step == 2:
            for layers in (module, expected, exact):
                layers[0].requires_grad_(True)
        train(module, optimizer, [step])
        train(expected, torchs, [step])
        train(exact, of_exact, [step])
        trained = zip(module.parameters(), expected.parameters(), exact.parameters(), strict=True)
        for parameter, eager, true in trained:
            assert_as_near(parameter, eager, true)
    assert all(slot_of(p).holds(p.grad) for p in module.parameters())


def test_values_written_by_others_are_taken_up(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD(module.parameters(), lr=1.0, dtype=torch.bfloat16)
    weight, bias = module[1].weight, module[1].bias
    kept = optimizer.state[bias]["master"].clone()
    assert not torch.equal(kept, kept.bfloat16().float())
    with torch.no_grad():
        weight[1] = 3.0
        bias.copy_(bias.clone())  # the same values
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    optimizer.step()
    assert weight[1].tolist() == [3.0] * 4
    assert optimizer.state[weight]["master"][1].tolist() == [3.0] * 4
    assert_same_bits(optimizer.state[bias]["master"], kept)


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(["step", "write", "save", "load", "accumulate"]), max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parameters_are_always_their_masters(history: list[str], dtype: torch.dtype) -> None:
    module = model("cpu")
    optimizer = DenseAdagrad(module.parameters(), lr=0.1, dtype=dtype)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    for number, action in enumerate(history):
        if action == "step":
            optimizer.step()
            optimizer.zero_grad()
        elif action == "write":
            with torch.no_grad():
                module[1].weight.fill_(number + 0.1)
        elif action == "save":
            saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        elif action == "load":
            optimizer.load_state_dict(saved[1])
            module.load_state_dict(saved[0])
        else:
            backward(module, number)
    values = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    for number, (parameter, value) in enumerate(zip(module.parameters(), values, strict=True)):
        assert_same_bits(parameter.detach(), value)
        if dtype is torch.bfloat16:
            assert_same_bits(state[number]["master"].to(dtype), value)


def test_schedulers_and_tensor_rates(device: torch.device) -> None:
    rates: list[Callable[[], Any]] = [
        lambda: 0.1,
        lambda: torch.tensor(0.1, device=device),
        lambda: torch.tensor(0.1),
    ]
    trained = []
    for rate in rates:
        module = model(device)
        optimizer = DenseAdagrad(module.parameters(), lr=rate())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for step in range(3):
            train(module, optimizer, [step])
            schedule.step()
        trained.append([parameter.detach().clone() for parameter in module.parameters()])
    for parameters in trained[1:]:
        for parameter, same in zip(parameters, trained[0], strict=True):
            assert_same_bits(parameter, same)


def test_a_captured_tensor_rate_survives_loading(device: torch.device) -> None:
    module, rate = model(device), torch.tensor(0.1, device=device)
    optimizer = DenseSGD(module.parameters(), lr=rate)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = torch.tensor(0.3)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == torch.tensor(0.3).item()


@pytest.mark.parametrize(
    ("unscaled", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, torch.float16)],
)
def test_under_a_loss_scaler(unscaled: bool, dtype: torch.dtype, device: torch.device) -> None:
    plain, scaled = model(device), model(device)
    optimizers = [DenseAdam(m.parameters(), lr=0.01, dtype=dtype) for m in (plain, scaled)]
    scaler = torch.amp.GradScaler(device.type, init_scale=16.0)
    for step in range(3):
        train(plain, optimizers[0], [step])
        optimizers[1].zero_grad()
        backward(scaled, step, scale=scaler.get_scale())
        scaler.scale(torch.zeros((), device=device))  # makes the scaler's tensors
        if unscaled:
            scaler.unscale_(optimizers[1])
        scaler.step(optimizers[1])
        scaler.update()
    for parameter, same in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert_same_bits(parameter, same)
    before = [parameter.detach().clone() for parameter in scaled.parameters()]
    next(scaled.parameters()).grad.fill_(torch.inf)
    scaler.step(optimizers[1])
    scaler.update()
    assert scaler.get_scale() == 8.0
    for parameter, same in zip(scaled.parameters(), before, strict=True):
        assert_same_bits(parameter.detach(), same)
    assert optimizers[1].state[next(scaled.parameters())]["step"].item() == 3


def test_groups_have_their_own_rates(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD([{"params": module[0].parameters(), "lr": 0.0}], lr=0.5)
    optimizer.add_param_group({"params": module[1].parameters()})
    before = [parameter.detach().clone() for parameter in module.parameters()]
    train(module, optimizer, [0])
    same = [torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)]
    assert same == [True] * 4 + [False] * 2
    assert len(optimizer.flat_parameters()) == 2


def test_copies_of_the_module_are_on_their_own(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD(module.parameters(), lr=0.1)
    twin = copy.deepcopy(module)
    train(module, optimizer, [0])
    assert all(slot_of(parameter) is None for parameter in twin.parameters())
    assert not torch.equal(twin[1].weight, module[1].weight)
    with pytest.raises(TypeError, match="DenseSGD cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_what_it_cannot_take(device: torch.device) -> None:
    bag = EmbeddingBag(5, 4, device=device)
    with pytest.raises(TypeError, match="got the weight of a table; give that one to torchembed"):
        DenseSGD(bag.parameters())
    with pytest.raises(ValueError, match=r"got one on the meta device; call to_empty\(\)"):
        DenseSGD(nn.Linear(3, 3, device="meta").parameters())
    with pytest.raises(TypeError, match=r"params must be float32 or .*, got float64"):
        DenseSGD(nn.Linear(3, 3, dtype=torch.float64, device=device).parameters())
    with pytest.raises(TypeError, match="dtype must be float32, float16 or bfloat16, got int8"):
        DenseSGD(nn.Linear(3, 3, device=device).parameters(), dtype=torch.int8)
    with pytest.raises(ValueError, match="lr must not be negative, got -1"):
        DenseSGD(nn.Linear(3, 3, device=device).parameters(), lr=-1.0)
    with pytest.raises(
        ValueError, match=r"betas must be two numbers in \[0, 1\), got \(1.0, 0.5\)"
    ):
        DenseAdam(nn.Linear(3, 3, device=device).parameters(), betas=(1.0, 0.5))


def test_what_it_cannot_load(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseAdagrad(module.parameters(), lr=0.1)
    state = optimizer.state_dict()
    without = {**state, "state": {**state["state"], 1: {"step": torch.zeros(())}}}
    with pytest.raises(ValueError, match=r"parameter 1 must hold \['step', 'sum'\], got \['step'"):
        optimizer.load_state_dict(without)
    wrong = {**state["state"][0], "sum": torch.zeros(3)}
    turned = {**state["state"][0], "sum": torch.zeros(5, 7)}
    for entry in (wrong, turned):
        with pytest.raises(ValueError, match=r"sum of parameter 0 must have shape \(7, 5\), got"):
            optimizer.load_state_dict({**state, "state": {**state["state"], 0: entry}})


def test_the_state_of_another_rule_is_refused(device: torch.device) -> None:
    module, twin = model(device), model(device)
    torchs = torch.optim.AdamW(twin.parameters())
    train(twin, torchs, [0])
    optimizer = DenseAdam(module.parameters())
    with pytest.raises(ValueError, match=r"decoupled_weight_decay of .* got True; DenseAdam has"):
        optimizer.load_state_dict(torchs.state_dict())


def test_a_module_that_was_cast_later_is_an_error(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD(module.parameters(), lr=0.1)
    module.bfloat16()
    backward(module, 0)
    with pytest.raises(RuntimeError, match=r"was moved, cast or replaced after its optimizer"):
        optimizer.step()


def test_a_parameter_whose_memory_was_reinterpreted_is_an_error(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD(module.parameters(), lr=0.1, dtype=torch.bfloat16)
    module[1].weight.data = module[1].weight.data.view(torch.float16)
    with pytest.raises(RuntimeError, match=r"shape \(3, 4\) was moved, cast or replaced after"):
        optimizer.before_replay()


def test_a_parameter_that_was_replaced_is_an_error(device: torch.device) -> None:
    module = model(device)
    optimizer = DenseSGD(module.parameters(), lr=0.1)
    module[1].weight.data = module[1].weight.data.clone()
    backward(module, 0)
    with pytest.raises(RuntimeError, match=r"shape \(3, 4\) was moved, cast or replaced after"):
        optimizer.step()
