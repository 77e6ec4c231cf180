"""Training for one seed until the score on the validation rows no longer improves."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from recipes.ctr.config import EarlyStoppedConfig
from recipes.ctr.rows import RowBatches
from recipes.ctr.splits import Splits
from recipes.result import Stopped
from torchembed.core import ranks
from torchembed.step.model_loss import LossFunction
from torchembed.training import (
    CheckpointFolder,
    EarlyStop,
    Evaluation,
    History,
    MetricsWriter,
    Progress,
    StopSignal,
    TaskEvaluations,
    TrainingRun,
    TrainPipeline,
    average_buffers,
    plot_history,
    train,
)

E = TypeVar("E", Evaluation, TaskEvaluations)


class Report(NamedTuple):
    """An evaluation on the validation rows, as early stopping and people read it."""

    score: float
    """A number that is greater for better models."""
    metrics: Mapping[str, float]
    """Metrics, by their names in ``metrics.jsonl``."""
    description: str
    """The metrics, in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee(Generic[E]):
    """A model, and what trains and evaluates it."""

    title: str
    """The model's name."""
    model: nn.Module
    loss_fn: LossFunction
    optimizers: Sequence[torch.optim.Optimizer]
    max_grad_norm: float | None = None
    """Bound of the norm of all gradients together; without it they are not clipped."""
    splits: Splits
    evaluate: Callable[[RowBatches], E]
    """From this rank's batches to the quality over those of all ranks; collective."""
    report: Callable[[E], Report]
    score_name: str


class SeedRun(NamedTuple, Generic[E]):
    """One training, its model as good on the validation rows as it got."""

    validation_score: float
    test: E
    history: History
    checkpoint: Path


def train_early_stopped(
    config: EarlyStoppedConfig, trainee: Trainee[E], seed: int, device: torch.device, output: Path
) -> SeedRun[E] | Stopped:
    """Train until the score on the validation rows has not improved for some epochs.

    It goes on after the last whole epoch that is in ``newest``.

    Args:
        config: how to train, and when to stop.
        trainee: its model is trained in place, and is at last as good as it got.
        seed: of the order of the rows, and of dropout.
        device: this rank's.
        output: for ``checkpoint``, the best, ``newest``, ``metrics.jsonl`` and ``training.png``.

    Raises:
        ValueError: where no evaluation on the validation rows has a score.
    """
    model, optimizers, splits = trainee.model, trainee.optimizers, trainee.splits
    # Dropout differs from rank to rank; all else that is random is drawn the same on each.
    torch.manual_seed(seed + 1000 * (1 + ranks.rank()))

    def batches(numbers: Tensor) -> RowBatches:
        rank, num_ranks = ranks.rank(), ranks.world_size()
        return RowBatches(
            splits.rows, numbers, batch_size=config.batch_size, rank=rank, num_ranks=num_ranks
        )

    def quality(numbers: Tensor) -> E:
        with config.precision.context(device):
            return trainee.evaluate(batches(numbers))

    history = History(read_loss_every=10)
    early_stop = EarlyStop(
        patience=config.patience,
        min_improvement=config.min_improvement,
        score_name=trainee.score_name,
    )
    trained = TrainingRun(model=model, optimizers=optimizers)
    state = dataclasses.replace(trained, others={"history": history, "early_stop": early_stop})
    best = CheckpointFolder(output / "checkpoint", keep=1)
    newest = CheckpointFolder(output / "newest", keep=1)
    newest.claim()
    newest.load(state)
    output.mkdir(exist_ok=True)
    epochs = range(len(history.held_out), config.max_epochs)
    order = torch.Generator().manual_seed(seed)
    for _ in history.held_out:
        torch.randperm(len(splits.train), generator=order)
    with (
        StopSignal() as stop,
        Progress(done=history.num_steps, label=f"seed {seed}") as progress,
        MetricsWriter(output, after_step=history.num_steps) as metrics,
        TrainPipeline(
            model,
            trainee.loss_fn,
            optimizers,
            autocast=config.precision.autocast,
            max_grad_norm=trainee.max_grad_norm,
        ) as pipeline,
    ):
        for epoch in epochs if early_stop.reason is None else ():
            shuffled = splits.train[torch.randperm(len(splits.train), generator=order)]
            train(
                pipeline,
                batches(shuffled),
                history=history,
                progress=progress,
                metrics=metrics,
                stop=stop,
            )
            if stop.is_agreed:
                return Stopped(num_steps=history.num_steps)
            average_buffers(model)
            now = quality(splits.validation)
            history.add_evaluation(now)
            report = trainee.report(now)
            metrics.write(history.num_steps, **report.metrics)
            progress.note(
                f"seed {seed}, epoch {epoch + 1}: training loss {history.losses[-1].loss:.4f}, "
                f"validation {report.description}"
            )
            if early_stop.update(history.num_steps, report.score):
                best.save(history.num_steps, trained)
            elif early_stop.reason is None:
                _multiply_learning_rates(optimizers, config.lr_decay)
            newest.save(history.num_steps, state)
            if early_stop.reason is not None:
                break
    if early_stop.best_auc is None:
        raise ValueError("the validation rows must have different labels, or there is no score")
    best.load(TrainingRun(model=model), early_stop.best_step)
    if ranks.rank() == 0:
        plot_history(history, output / "training.png", title=f"{trainee.title}, seed {seed}")
    return SeedRun(early_stop.best_auc, quality(splits.test), history, output / "checkpoint")


def _multiply_learning_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor
