"""Our pipeline trains as TorchRec's, as far as two placements of TorchRec's own agree."""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.torchrec_cases import (
    ADAGRAD,
    ADAM,
    MIXED,
    SETTINGS,
    SGD,
    optimizer_class,
    variants,
)
from tests.support.torchrec_pipelines import NUM_STEPS, batches, make_pipeline

NUM_EAGER_STEPS = 6
"""Steps on a CPU, where none of them is captured."""


class Trained(NamedTuple):
    losses: Tensor
    logits: Tensor
    weights: Tensor
    steps: str
    """The kinds that they were on a GPU: graphs of batches with fixed hotness, padded ones, or
    none."""


def train(
    whose: str,
    optimizer: str,
    placements: Sequence[str],
    device: torch.device,
    *,
    is_fixed: bool,
    with_scheduler: bool = False,
    **arguments: Any,
) -> Trained:
    """Theirs has their sharders, too."""
    from tests.support.torchrec_training import make_run, weights_of

    settings = {**SETTINGS[optimizer], **arguments.pop("settings", {})}
    run = make_run(
        whose,
        device,
        placements,
        optimizer_class(optimizer),
        settings,
        for_pipeline=True,
        **arguments,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.7)
    pipeline = make_pipeline(whose, run)
    losses, logits = [], []
    num_steps = NUM_STEPS if device.type == "cuda" else NUM_EAGER_STEPS
    stream = batches(run, num_steps, is_fixed=is_fixed)
    for _ in range(num_steps):
        loss, of_step, _ = pipeline.progress(stream)
        losses.append(loss)
        logits.append(of_step)
        if with_scheduler:
            scheduler.step()
    with pytest.raises(StopIteration):
        pipeline.progress(stream)
    steps = "none"
    if whose == "ours":
        steps = _kind_of_steps(pipeline)
        pipeline.close()
    return Trained(
        torch.stack(losses).double().cpu(),
        torch.cat(logits).double().cpu(),
        weights_of(run),
        steps,
    )


def _kind_of_steps(pipeline: Any) -> str:
    if pipeline._steps is None:
        return "theirs"
    from torchembed.step.engines.padded_engine import PaddedEngine
    from torchembed.step.engines.static_engine import StaticEngine

    captured = {type(e) for e in pipeline._steps._pipeline.engines if e.is_captured}
    if StaticEngine in captured:
        return "graphs"
    return "padded graphs" if PaddedEngine in captured else "none"


class Distances(NamedTuple):
    losses: float
    logits: float
    weights: float


class Comparison(NamedTuple):
    ours: Distances
    """Distances of ours from theirs."""
    drift: Distances
    """The greatest between placements of theirs."""
    steps: str
    expected_steps: str


PLACEMENTS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
"""The optimizer of the last one's tables is that of the dense part."""


def cases(device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the arguments of :func:`train` but ``whose``."""
    for optimizer, is_fixed in ((ADAGRAD, True), (SGD, False)):
        for placement in PLACEMENTS:
            case = {"optimizer": optimizer, "placements": [placement], "is_fixed": is_fixed}
            yield f"{placement}, {optimizer}, {'fixed' if is_fixed else 'jagged'}", case
    yield "rowwise_adagrad", {**MIXED, "is_fixed": True}
    found = variants(device)
    # Else TorchRec divides vectors of the other tables, too.
    found["mean"] |= {"placements": ["row_wise"]}
    found["other mean"] = {**found["mean"], "placements": ["table_wise", "column_wise"]}
    of_dense = torch.optim
    found["dense adagrad"] = {
        "dense_optimizer": functools.partial(of_dense.Adagrad, lr=0.02, weight_decay=0.01, eps=1e-3)
    }
    # Its step count, and what is not ours of it.
    found["dense adam"] = {
        "dense_optimizer": functools.partial(of_dense.Adam, lr=0.01, eps=1e-4),
        "with_scheduler": True,
    }
    found["dense momentum"] = {
        "dense_optimizer": functools.partial(of_dense.SGD, lr=0.05, momentum=0.9)
    }
    if device.type == "cuda":
        found |= {"adam": {"optimizer": ADAM}}
    takes_turns = itertools.cycle([True, False])
    for name, rest in found.items():
        is_fixed = next(takes_turns)
        case = {**MIXED, **rest, "is_fixed": is_fixed}
        yield f"{name}, {'fixed' if is_fixed else 'jagged'}", case


def _expected_steps(case: dict[str, Any]) -> str:
    """The kinds of steps on a GPU."""
    if case["optimizer"] == ADAM:
        return "theirs"
    if case.get("is_sequence"):
        return "none"
    return "graphs" if case["is_fixed"] else "padded graphs"


def _distances(a: Trained, b: Trained) -> Distances:
    return Distances(
        float((a.losses - b.losses).abs().max()),
        float((a.logits - b.logits).abs().max()),
        float((a.weights - b.weights).abs().mean()),
    )


def compare(device: torch.device) -> dict[str, Comparison]:
    theirs: dict[str, Trained] = {}
    of_cases: dict[str, tuple[Distances, Trained, dict[str, Any]]] = {}
    for name, case in cases(device):
        theirs[name], ours = (train(whose, device=device, **case) for whose in ("theirs", "ours"))
        of_cases[name] = _distances(theirs[name], ours), ours, case
    drifts = [
        _distances(theirs[f"{one}, {kind}"], theirs[f"{other}, {kind}"])
        for kind in (f"{ADAGRAD}, fixed", f"{SGD}, jagged")
        for one, other in itertools.combinations(PLACEMENTS[:3], 2)
    ]
    drift = Distances(*(max(of_kind) for of_kind in zip(*drifts, strict=True)))
    return {
        name: Comparison(distances, drift, ours.steps, _expected_steps(case))
        for name, (distances, ours, case) in of_cases.items()
    }


def everything(device_type: str) -> dict[str, Any]:
    """On a rank."""
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    return {"training": compare(device)}


def everything_on_four(device_type: str) -> list[Distances]:
    """On a rank of four, on two hosts: of tables whose rows and columns stay within them."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    placements = ["table_row_wise", "column_wise"]
    found = []
    for optimizer, is_fixed in ((ADAGRAD, True), (SGD, False)):
        theirs, ours = (
            train(whose, optimizer, placements, device, is_fixed=is_fixed)
            for whose in ("theirs", "ours")
        )
        found.append(_distances(theirs, ours))
    return found


def test_training_within_hosts_is_torchrecs(answers_of_four: list[dict[str, Any]]) -> None:
    for of_rank in answers_of_four:
        for distances in of_rank["pipeline"]:
            assert max(distances) <= 2 * torch.finfo(torch.float32).eps


def test_training_is_torchrecs(answers: list[dict[str, Any]], device: torch.device) -> None:
    for answer in answers:
        for name, (ours, drift, steps, expected_steps) in answer["pipeline"]["training"].items():
            is_rounded = "half" in name or "wire" in name
            rounding = torch.finfo(torch.float16 if is_rounded else torch.float32).eps
            for distance, of_theirs in zip(ours, drift, strict=True):
                # A rounding of the tables, and one of the dense part, whose optimizer may differ.
                assert distance <= 3 * of_theirs + 2 * rounding, (name, ours, drift)
            if device.type == "cuda":
                assert steps == expected_steps, name
