"""Drives one engine as a pipeline does, also where a pipeline would choose another one."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchembed.core import ranks
from torchembed.step.batches.batch_layout import num_ids_in
from torchembed.step.engines.engine import StepEngine
from torchembed.step.engines.jagged_engine import JaggedEngine
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.model_loss import LossFunction, loss_and_output
from torchembed.step.stages import Agreement, BatchKinds, ReadBatch, Reason, TrainedBatch

JAGGED = BatchKinds(static=False, jagged=True)


def program_of(
    model: nn.Module, loss_fn: LossFunction | None, optimizers: Sequence[torch.optim.Optimizer]
) -> StepProgram:
    """The doings of a pipeline's steps on a CPU."""
    autocast = torch.autocast("cpu", enabled=False)
    return StepProgram(
        model=model,
        compute_loss=functools.partial(loss_and_output, loss_fn=loss_fn, autocast=autocast),
        optimizers=list(optimizers),
        device=torch.device("cpu"),
        group=dist.group.WORLD if ranks.world_size() > 1 else None,
    )


def as_read(batches: Sequence[Any]) -> list[ReadBatch]:
    """Jagged batches, as a pipeline has read them."""

    def read(number: int, data: Any) -> ReadBatch:
        least = ranks.start_minimum(-num_ids_in(data))
        return ReadBatch(data, number, JAGGED, lambda: Agreement(JAGGED, -least()[0]))

    return [read(number, data) for number, data in enumerate(batches)]


def trained_by(engine: StepEngine, batches: Sequence[Any]) -> Iterator[TrainedBatch | Reason]:
    """Each jagged batch trained by ``engine``, and the next one prefetched."""
    reads = as_read(batches)
    for number, now in enumerate(reads):
        upcoming = reads[number + 1 : number + 2]
        for batch in upcoming:
            engine.prefetch(batch)
        yield engine.run(now, upcoming)


def trained_jagged(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Any],
) -> Iterator[TrainedBatch]:
    """Each batch trained by steps of varying sizes, which are not captured."""
    engine = JaggedEngine(program_of(model, loss_fn, optimizers))
    for trained in trained_by(engine, batches):
        assert not isinstance(trained, Reason)
        yield trained
    engine.release()
