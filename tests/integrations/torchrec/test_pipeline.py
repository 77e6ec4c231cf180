"""Our pipeline trains as TorchRec's, as far as two placements of TorchRec's own agree."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.torchrec.test_training import (
    ADAGRAD,
    ADAM,
    MIXED,
    ROWWISE_ADAGRAD,
    SETTINGS,
    SGD,
    optimizer_class,
    variants,
)

NUM_STEPS, LAST_SIZE = 16, 5
"""The last batch is a small one. On a GPU, steps are graphs from the fifth on."""


class Trained(NamedTuple):
    losses: Tensor
    logits: Tensor
    weights: Tensor
    steps: str
    """What they were on a GPU: graphs as a whole, in part, or none."""


def batches(run: Any, count: int, *, is_fixed: bool, first: int = 0) -> Iterator[Any]:
    from torchrec.datasets.utils import Batch

    from tests.integrations.torchrec.training import BATCH_SIZE, batch

    for step in range(first, first + count):
        is_last = step == first + count - 1
        yield Batch(
            *batch(
                step,
                torch.device("cpu"),
                weighted=run.weighted,
                ids_dtype=run.ids_dtype,
                size=LAST_SIZE if is_last else BATCH_SIZE,
                is_fixed=is_fixed,
            )
        )


def make_pipeline(whose: str, run: Any, **settings: Any) -> Any:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    from torchembed.integrations.torchrec import TrainPipeline

    kind: Any = TrainPipelineSparseDist if whose == "theirs" else TrainPipeline
    return kind(run.model, run.optimizer, run.device, **settings)


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
    from tests.integrations.torchrec.training import make_run, weights_of

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
    stream = batches(run, NUM_STEPS, is_fixed=is_fixed)
    for _ in range(NUM_STEPS):
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
    if pipeline._theirs is not None:
        return "theirs"
    ours = pipeline._steps._pipeline
    if ours._static is not None and ours._static.is_captured(0) and ours._static.is_captured(1):
        return "graphs"
    return "dense graphs" if ours._jagged is not None and ours._jagged.is_captured else "none"


class Comparison(NamedTuple):
    """Distances of ours from theirs, and between placements of theirs."""

    losses: float
    logits: float
    weights: float
    losses_drift: float
    logits_drift: float
    weights_drift: float
    steps: str


def cases(device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the arguments of :func:`train` but ``whose``."""
    placements = ["table_wise", "row_wise", "column_wise", "data_parallel"]
    optimizers = [SGD, ADAGRAD, ROWWISE_ADAGRAD]
    takes_turns = itertools.cycle([True, False])
    for number, placement in enumerate(placements):
        optimizer = optimizers[number % 3]
        for is_fixed in (True, False):
            name = f"{placement}, {optimizer}, {'fixed' if is_fixed else 'jagged'}"
            case = {"optimizer": optimizer, "placements": [placement], "is_fixed": is_fixed}
            yield name, case
    found = variants(device)
    if device.type == "cuda":
        adam = {**MIXED, "optimizer": ADAM}
        found |= {"adam": adam}
    for name, rest in found.items():
        is_fixed = next(takes_turns)
        yield (
            f"{name}, {'fixed' if is_fixed else 'jagged'}",
            {
                **MIXED,
                **rest,
                "is_fixed": is_fixed,
            },
        )


def compare(device: torch.device) -> dict[str, Comparison]:
    @functools.cache
    def drift(optimizer: str, is_fixed: bool) -> tuple[Trained, Trained]:
        return tuple(  # type: ignore[return-value]
            train("theirs", optimizer, [placement], device, is_fixed=is_fixed)
            for placement in ("table_wise", "row_wise")
        )

    found = {}
    for name, case in cases(device):
        by_table, by_row = drift(case["optimizer"], case["is_fixed"])
        a, b = (train(whose, device=device, **case) for whose in ("theirs", "ours"))
        found[name] = Comparison(
            losses=float((a.losses - b.losses).abs().max()),
            logits=float((a.logits - b.logits).abs().max()),
            weights=float((a.weights - b.weights).abs().mean()),
            losses_drift=float((by_table.losses - by_row.losses).abs().max()),
            logits_drift=float((by_table.logits - by_row.logits).abs().max()),
            weights_drift=float((by_table.weights - by_row.weights).abs().mean()),
            steps=b.steps,
        )
    return found


def everything(device_type: str) -> dict[str, Any]:
    """On a rank."""
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    return {"training": compare(device)}


def test_training_is_torchrecs(answers: list[dict[str, Any]], device: torch.device) -> None:
    for answer in answers:
        for name, case in answer["pipeline"]["training"].items():
            rounding = torch.finfo(torch.float32).eps
            assert case.losses <= 3 * case.losses_drift + rounding, (name, case)
            assert case.logits <= 3 * case.logits_drift + 4 * rounding, (name, case)
            assert case.weights <= 3 * case.weights_drift, (name, case)
            if device.type == "cuda":
                assert case.steps in ("graphs", "dense graphs"), (name, case)
