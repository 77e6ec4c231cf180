"""Training over our tables is TorchRec's, as far as two placements of its own tables agree."""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.torchrec_cases import (
    ADAGRAD,
    ADAM,
    MIXED,
    ROWWISE_ADAGRAD,
    SETTINGS,
    SGD,
    optimizer_class,
    variants,
)

NUM_STEPS = 6


class Trained(NamedTuple):
    losses: Tensor
    weights: Tensor


def train(
    whose: str,
    optimizer: str,
    placements: Sequence[str],
    device: torch.device,
    *,
    with_scheduler: bool = False,
    **arguments: Any,
) -> Trained:
    from tests.support.torchrec_training import make_run, weights_of

    settings = {**SETTINGS[optimizer], **arguments.pop("settings", {})}
    run = make_run(whose, device, placements, optimizer_class(optimizer), settings, **arguments)
    after = None
    if with_scheduler:
        after = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.7).step
    losses = run.steps(0, NUM_STEPS, after)
    return Trained(torch.tensor(losses, dtype=torch.float64), weights_of(run))


class Comparison(NamedTuple):
    """Distances of ours from theirs, and between placements of theirs, in one case."""

    losses: float
    weights: float
    losses_drift: float
    weights_drift: float
    moved: float
    """How far their weights are from where row-wise SGD leaves them: what a tolerance must be
    small beside."""


def cases(device: torch.device, num_ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the arguments of :func:`train` but ``whose``."""
    placements = ["table_wise", "row_wise", "column_wise", "data_parallel"]
    optimizers = [SGD, ADAGRAD, ROWWISE_ADAGRAD]
    if num_ranks == 4:
        placements, optimizers = ["table_row_wise", "column_wise"], [ROWWISE_ADAGRAD]
    elif device.type == "cuda":
        optimizers.append(ADAM)  # FBGEMM has it on GPUs only
    for optimizer in optimizers:
        for placement in placements:
            yield f"{optimizer}, {placement}", {"optimizer": optimizer, "placements": [placement]}
    if num_ranks == 4:
        return
    yield from ((name, {**MIXED, **rest}) for name, rest in variants(device).items())


def everything(device_type: str) -> dict[str, Comparison]:
    """On a rank."""
    num_ranks = dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")

    @functools.cache
    def theirs(optimizer: str, placement: str) -> Trained:
        return train("theirs", optimizer, [placement], device)

    start = theirs(SGD, "row_wise").weights
    found = {}
    for name, case in cases(device, num_ranks):
        optimizer = case["optimizer"]
        by_table, by_row = theirs(optimizer, "table_wise"), theirs(optimizer, "row_wise")
        is_plain = len(case) == 2 and len(case["placements"]) == 1
        b = train("ours", device=device, **case)
        a = (
            theirs(optimizer, *case["placements"])
            if is_plain
            else train("theirs", device=device, **case)
        )
        found[name] = Comparison(
            losses=float((a.losses - b.losses).abs().max()),
            weights=float((a.weights - b.weights).abs().mean()),
            losses_drift=float((by_table.losses - by_row.losses).abs().max()),
            weights_drift=float((by_table.weights - by_row.weights).abs().mean()),
            moved=float((by_row.weights - start).abs().mean()),
        )
    return found


everything_on_four = everything


def test_training_is_torchrecs(answers: list[dict[str, Any]]) -> None:
    check([of_rank["training"] for of_rank in answers])


def test_training_within_hosts_is_torchrecs(answers_of_four: list[dict[str, Any]]) -> None:
    check([of_rank["training"] for of_rank in answers_of_four])


def check(of_ranks: list[dict[str, Comparison]]) -> None:
    for found in of_ranks:
        for name, case in found.items():
            rounding = torch.finfo(torch.float32).eps
            assert case.losses <= 3 * case.losses_drift + rounding, (name, case)
            assert case.weights <= 3 * case.weights_drift, (name, case)
