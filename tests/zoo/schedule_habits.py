"""Learning rates and other hyperparameters that change while a model is trained."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import torchembed
from tests.zoo.entries import Case, Family, adagrad, beside_tables, parts
from tests.zoo.ranker import Ranker, with_adam
from tests.zoo.sizes import Sizes

SCHEDULES = Family("schedules")
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def _of_ours(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables, dense = parts(model)
    return [
        torchembed.optim.Adam(tables, lr=0.01),
        torchembed.optim.DenseAdam(dense, lr=0.01),
    ]


def _scheduled(
    sizes: Sizes,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    make: MakeScheduler,
) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=optimizers(model))
    schedulers = [make(optimizer) for optimizer in case.optimizers]

    def after_step(*_: object) -> None:
        for scheduler in schedulers:
            scheduler.step()

    case.after_step = after_step
    return case


def _add(name: str, make: MakeScheduler) -> None:
    """An entry with a scheduler of torch for one of torchembed's optimizers of all parameters."""
    SCHEDULES.habit(name)(lambda sizes: _scheduled(sizes, lambda model: [adagrad(model)], make))


_add("StepLR", lambda optimizer: lr_scheduler.StepLR(optimizer, 3))
_add("CosineAnnealingLR", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12))
_add(
    "warm-up by LambdaLR",
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 6)),
)
_add(
    "warm-up, then decay",
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        milestones=[5],
    ),
)


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)


@SCHEDULES.habit("OneCycleLR that cycles betas of torch's Adam")
def one_cycle(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    scheduler = _one_cycle(case.optimizers[1])
    case.after_step = lambda *_: scheduler.step()
    return case


@SCHEDULES.habit("OneCycleLR that cycles betas of fused Adams")
def one_cycle_of_fused(sizes: Sizes) -> Case:
    return _scheduled(sizes, _of_ours, _one_cycle)


@SCHEDULES.habit("OneCycleLR that cycles the momentum of SGD")
def one_cycle_of_sgd(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(
        model=model,
        optimizers=beside_tables(model, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    )
    scheduler = _one_cycle(case.optimizers[1])
    case.after_step = lambda *_: scheduler.step()
    return case


@SCHEDULES.habit("ReduceLROnPlateau")
def plateau(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = with_adam(model)
    schedulers = [lr_scheduler.ReduceLROnPlateau(o, patience=1) for o in case.optimizers]
    case.after_step = lambda number, loss: [s.step(float(loss)) for s in schedulers]
    return case


@SCHEDULES.habit("learning rates set by hand")
def by_hand(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=_of_ours(model))

    def before_step(number: int) -> None:
        for optimizer in case.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + math.cos(number / 4))

    case.before_step = before_step
    return case


@SCHEDULES.habit("weight decay that is raised")
def weight_decay(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=_of_ours(model))

    def before_step(number: int) -> None:
        for optimizer in case.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * number

    case.before_step = before_step
    return case


@SCHEDULES.habit("eps that is lowered once")
def eps(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    case = Case(model=model, optimizers=[adagrad(model)])

    def before_step(number: int) -> None:
        if number == 7:
            for group in case.optimizers[0].param_groups:
                group["eps"] = 0.1

    case.before_step = before_step
    return case


@SCHEDULES.habit("groups with and without weight decay")
def groups(sizes: Sizes) -> Case:
    model = Ranker(sizes)

    def make(dense: list[nn.Parameter]) -> torch.optim.Optimizer:
        decayed = [p for p in dense if p.dim() > 1]
        others = [p for p in dense if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=0.01,
        )

    return Case(model=model, optimizers=beside_tables(model, make))


@SCHEDULES.habit("parameter group that is added in the middle")
def added_group(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    last = list(model.deep[4].parameters())
    tables, dense = parts(model)
    first = [p for p in dense if all(p is not other for other in last)]
    adam = torch.optim.Adam(first, lr=0.01)
    for parameter in last:
        parameter.requires_grad_(False)

    def before_step(number: int) -> None:
        if number == 6:
            for parameter in last:
                parameter.requires_grad_(True)
            adam.add_param_group({"params": last, "lr": 0.005})

    return Case(
        model=model,
        optimizers=[torchembed.optim.Adagrad(tables, lr=0.05), adam],
        before_step=before_step,
    )


@SCHEDULES.habit("learning rates of layers")
def rates_of_layers(sizes: Sizes) -> Case:
    model = Ranker(sizes)
    tables, _ = parts(model)
    of_layers = [
        {"params": list(layer.parameters()), "lr": 0.01 * 0.5**number}
        for number, layer in enumerate(model.deep)
        if list(layer.parameters())
    ]
    dense = torchembed.optim.DenseAdagrad(of_layers, lr=0.01)
    return Case(model=model, optimizers=[torchembed.optim.Adagrad(tables, lr=0.1), dense])
