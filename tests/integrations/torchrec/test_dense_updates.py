"""Our steps of torch's optimizers are torch's, with the optimizers' own states."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tolerance import assert_as_near

NUM_STEPS = 6
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "adagrad": functools.partial(
        torch.optim.Adagrad, lr=0.1, eps=1e-3, initial_accumulator_value=0.1
    ),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, eps=1e-3, betas=(0.8, 0.95)),
}
OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "lr_decay": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1),
}


def _gradients(step: int, device: torch.device) -> list[Tensor | None]:
    """Gradients of three parameters, one of which has none in some steps."""
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(shape, generator=generator).to(device) for shape in ((5, 3), (3,), (7,))]
    return [*found[:2], found[2] if step != 2 else None]


def _everything_of(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[tuple[str, Tensor]]:
    """Values and states, by name."""
    states = [
        (name, value.detach().cpu())
        for parameter in parameters
        for name, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor)
    ]
    return [*(("value", parameter.detach().cpu()) for parameter in parameters), *states]


def trained(name: str, device: torch.device) -> list[list[tuple[str, Tensor]]]:
    """By us, by torch and by torch in float64: values and states, after a change of the learning
    rate, a step that is skipped, updates before a step, states that were loaded, and step counts
    that were set back."""
    from torchembed.integrations.torchrec.trained_model.dense_parameters import AliasedParameter
    from torchembed.integrations.torchrec.trained_model.dense_updates import (
        DenseUpdates,
        plain_optimizers,
    )

    torch.manual_seed(4)
    first = [nn.Parameter(torch.randn(s, device=device)) for s in ((5, 3), (3,), (7,))]
    theirs, mine = copy.deepcopy(first), copy.deepcopy(first)
    exact = [nn.Parameter(parameter.detach().double()) for parameter in first]
    optimizers = [OPTIMIZERS[name](parameters) for parameters in (mine, theirs, exact)]
    own = optimizers[0]
    leaves = [AliasedParameter(parameter, nn.Parameter(parameter.detach())) for parameter in mine]
    assert plain_optimizers(own) == [own]
    updates = DenseUpdates([own], leaves)
    known = None
    for step in range(NUM_STEPS):
        if step == 3:
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.02
        if step == 4:
            own.load_state_dict(copy.deepcopy(own.state_dict()))
        if step == 5:
            for optimizer in optimizers:
                for state in optimizer.state.values():
                    if "step" in state:
                        state["step"].sub_(2)
        for pair, eager, true, grad in zip(
            leaves, theirs, exact, _gradients(step, device), strict=True
        ):
            pair.alias.grad = grad
            eager.grad = None if grad is None else grad.clone()
            true.grad = None if grad is None else grad.double()
        granted = updates.begin()
        assert known is None or (granted == known) == (step != 4 or name == "sgd")
        known = granted
        before = [pair.alias.detach().clone() for pair in leaves]
        updates.skip = torch.ones(1, device=device)
        updates.step()
        assert all(torch.equal(pair.alias, b) for pair, b in zip(leaves, before, strict=True))
        updates.skip = None
        early = [pair.alias for pair in leaves[step % 3 :]]
        if step:  # some before the others, once each
            updates.step_early(early)
            updates.step_early(early)
        updates.step()
        updates.end()
        for optimizer in optimizers[1:]:
            optimizer.step()
    return [
        _everything_of(parameters, optimizer)
        for parameters, optimizer in zip((mine, theirs, exact), optimizers, strict=True)
    ]


def after_a_failure(device: torch.device, *, fails: bool) -> list[tuple[str, Tensor]]:
    """Values and states after two steps of Adam; between them, where it ``fails``, one that has
    updated a parameter does not end, and what it wrote is put back."""
    from torchembed.integrations.torchrec.trained_model.dense_parameters import AliasedParameter
    from torchembed.integrations.torchrec.trained_model.dense_updates import DenseUpdates

    torch.manual_seed(4)
    parameters = [nn.Parameter(torch.randn(size, device=device)) for size in (3, 7)]
    optimizer = OPTIMIZERS["adam"](parameters)
    leaves = [AliasedParameter(p, nn.Parameter(p.detach())) for p in parameters]
    updates = DenseUpdates([optimizer], leaves)
    for step in range(3 if fails else 2):
        updates.begin()
        for pair in leaves:
            pair.alias.grad = pair.alias.detach().sin()
        if fails and step == 1:
            changed = [leaves[0].alias.detach()]
            changed += [s for name, s in optimizer.state[parameters[0]].items() if name != "step"]
            before = [tensor.clone() for tensor in changed]
            updates.step_early([leaves[0].alias])
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            updates.zero_grad()
            continue
        updates.step()
        updates.end()
    return _everything_of(parameters, optimizer)


def left_to_torch() -> list[int]:
    """How many optimizers of those are ours whose rules we have not."""
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    from torchembed.integrations.torchrec.trained_model.dense_updates import plain_optimizers

    parameters = {"a": nn.Parameter(torch.ones(2))}
    hooked = OPTIMIZERS["sgd"](parameters.values())
    hooked.register_step_pre_hook(lambda *_: None)
    found = [len(plain_optimizers(make(parameters.values()))) for make in OTHERS.values()]
    wrapped = KeyedOptimizerWrapper(parameters, OPTIMIZERS["adam"])
    return [
        *found,
        len(plain_optimizers(hooked)),
        len(plain_optimizers(CombinedOptimizer([wrapped]))),
    ]


def everything(device_type: str) -> dict[str, Any]:
    """On a rank."""
    device = torch.device(device_type)
    return {
        **{name: trained(name, device) for name in OPTIMIZERS},
        "failures": [after_a_failure(device, fails=fails) for fails in (False, True)],
        "left": left_to_torch(),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_torchs(answers: list[dict[str, Any]], name: str) -> None:
    for (ours, found), (theirs, eager), (_, true) in zip(
        *answers[0]["dense_updates"][name], strict=True
    ):
        assert ours == theirs
        assert_as_near(found, eager, true.double())


def test_a_step_that_fails_is_not_counted(answers: list[dict[str, Any]]) -> None:
    without, after = answers[0]["dense_updates"]["failures"]
    for (name, expected), (same, found) in zip(without, after, strict=True):
        assert name == same
        assert torch.equal(found, expected)


def test_other_rules_are_left_to_torch(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["dense_updates"]["left"] == [0] * (len(OTHERS) + 1) + [1]
