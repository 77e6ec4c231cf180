"""A training in parts: a model and its optimizers, with all that a later part goes on from."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.dlrm_dcnv2.config import DlrmConfig
from torchembed.data import BatchSource
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.training import (
    CheckpointFolder,
    Epochs,
    Evaluation,
    History,
    MetricsWriter,
    Progress,
    StopSignal,
    TrainingRun,
    TrainPipeline,
    train,
)


@dataclasses.dataclass(kw_only=True)
class ResumableTraining:
    """The base of loops whose runs go on from their newest checkpoint."""

    config: DlrmConfig
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    validation: BatchSource
    output: Path

    def __post_init__(self) -> None:
        self.pipeline = TrainPipeline(
            self.model,
            binary_cross_entropy,
            self.optimizers,
            autocast=self.config.precision.autocast,
        )
        self.history = History(read_loss_every=self.config.read_loss_every)
        self.schedulers = [self.config.schedule.scheduler(o) for o in self.optimizers]
        self.checkpoints = CheckpointFolder(self.output / "checkpoint", keep=2)

    def load(self, **others: Any) -> int | None:
        """Go on from the newest checkpoint, where there is one, whose step is returned. ``others``
        are saved and loaded with the rest, by their state dicts."""
        self.state = TrainingRun(
            model=self.model,
            optimizers=self.optimizers,
            others={
                "history": self.history,
                **others,
                **{f"schedulers.{i}": scheduler for i, scheduler in enumerate(self.schedulers)},
            },
        )
        self.checkpoints.claim()
        return self.checkpoints.load(self.state)

    def metrics_writer(self) -> MetricsWriter:
        """Writes the metrics of the steps from here on."""
        return MetricsWriter(
            self.output,
            tensorboard=self.config.tensorboard,
            after_step=self.history.num_steps,
        )

    def train(
        self,
        epochs: Epochs,
        progress: Progress,
        metrics: MetricsWriter,
        stop: StopSignal,
        *,
        max_steps: int | None,
    ) -> None:
        """Train on the next batches of ``epochs``, to their end, to a signal or ``max_steps``."""
        train(
            self.pipeline,
            epochs,
            schedulers=self.schedulers,
            max_steps=max_steps,
            history=self.history,
            progress=progress,
            metrics=metrics,
            stop=stop,
        )

    def add_evaluation(self, now: Evaluation, metrics: MetricsWriter) -> None:
        """Add an evaluation after the last step to the history and to the metrics."""
        self.history.add_evaluation(now)
        step = self.history.num_steps
        metrics.write(step, validation_auc=now.auc, validation_logloss=now.logloss)
