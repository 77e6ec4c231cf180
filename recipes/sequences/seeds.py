"""Training once for each seed, with rankings along the way."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

import torchembed
from recipes.result import RankingResult, Stopped
from recipes.seeds import train_each_seed
from recipes.sequences.config import RunConfig
from torchembed.core import ranks
from torchembed.training import (
    BatchLoss,
    CheckpointFolder,
    History,
    MetricsWriter,
    Progress,
    RankingEvaluation,
    StopSignal,
    TrainingRun,
    TrainPipeline,
    plot_history,
    train,
)

_BETAS = (0.9, 0.98)


class Trainee(NamedTuple):
    """A model, and what trains and evaluates it."""

    model: nn.Module
    loss_fn: BatchLoss | None
    """None where the model computes its loss."""
    batches: Callable[[int], Iterable[object]]
    """From an epoch to this rank's batches."""
    num_batches: int
    """Batches of an epoch."""
    num_samples: int
    """Samples of an epoch, over all ranks."""
    evaluate: Callable[[], RankingEvaluation]
    """Ranks the held-out items; collective."""


class EpochsDone:
    """The number of epochs that are trained: an epoch may have other numbers of steps in a run that
    goes on with other batches."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> StateDict:
        return {"count": self.count}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.count = state_dict["count"]


class SeedRun(NamedTuple):
    """One training."""

    test: RankingEvaluation
    history: History
    checkpoint: Path
    num_samples: int
    """Samples of all its epochs, over all ranks."""


def run_seeds(
    config: RunConfig, prepare: Callable[[int], Trainee], output: Path
) -> RankingResult | Stopped:
    """Train once for each seed; the result is the mean, and the last one's checkpoint.

    Args:
        prepare: from a seed to what is trained.
        output: for a folder of each seed with ``checkpoint``, from which it goes on,
            ``metrics.jsonl`` and ``training.png``.
    """
    runs = train_each_seed(
        config.seeds, lambda seed, folder: _run_seed(config, prepare(seed), seed, folder), output
    )
    if isinstance(runs, Stopped):
        return runs
    tests = [found.test for found in runs.values()]
    histories = [found.history for found in runs.values()]
    return RankingResult(
        hr_10=fmean(test.hit_rate[10] for test in tests),
        ndcg_10=fmean(test.ndcg[10] for test in tests),
        hr_50=fmean(test.hit_rate[50] for test in tests),
        hr_200=fmean(test.hit_rate[200] for test in tests),
        hr_10_by_seed={seed: found.test.hit_rate[10] for seed, found in runs.items()},
        ndcg_10_by_seed={seed: found.test.ndcg[10] for seed, found in runs.items()},
        samples_per_second=sum(found.num_samples for found in runs.values())
        / sum(history.seconds for history in histories),
        num_steps=sum(history.num_steps for history in histories),
        checkpoint=runs[config.seeds[-1]].checkpoint,
    )


def _run_seed(config: RunConfig, trainee: Trainee, seed: int, output: Path) -> SeedRun | Stopped:
    """Train for all epochs; goes on after the last evaluation that is in ``checkpoint``."""
    model, num_batches = trainee.model, trainee.num_batches
    optimizers = build_optimizers(config, model)
    # Dropout and negatives differ from rank to rank; all else that is random is the same on each.
    torch.manual_seed(seed + 1000 * (1 + ranks.rank()))
    history, done = History(read_loss_every=10), EpochsDone()
    checkpoints = CheckpointFolder(output / "checkpoint", keep=1)
    checkpoints.claim()
    others = {"history": history, "epochs": done}
    state = TrainingRun(model=model, optimizers=optimizers, others=others)
    checkpoints.load(state)
    output.mkdir(exist_ok=True)
    test: RankingEvaluation | None = None
    num_steps = history.num_steps + max(config.epochs - done.count, 0) * num_batches
    with (
        StopSignal() as stop,
        Progress(total=num_steps, done=history.num_steps, label=f"seed {seed}") as progress,
        MetricsWriter(output, after_step=history.num_steps) as metrics,
        TrainPipeline(
            model, trainee.loss_fn, optimizers, autocast=config.precision.autocast
        ) as pipeline,
    ):
        for epoch in range(done.count, config.epochs):
            train(
                pipeline,
                trainee.batches(epoch),
                history=history,
                progress=progress,
                metrics=metrics,
                stop=stop,
            )
            if stop.is_agreed:
                return Stopped(num_steps=history.num_steps)
            done.count = epoch + 1
            if (epoch + 1) % config.evaluate_every and epoch + 1 < config.epochs:
                continue
            test = trainee.evaluate()
            metrics.write(history.num_steps, **test.scalars())
            progress.note(
                f"seed {seed}, epoch {epoch + 1}: training loss {history.losses[-1].loss:.4f}, "
                f"HR@10 {test.hit_rate[10]:.4f}, NDCG@10 {test.ndcg[10]:.4f}"
            )
            checkpoints.save(history.num_steps, state)
    if test is None:  # all epochs were trained before
        test = trainee.evaluate()
    if ranks.rank() == 0:
        plot_history(history, output / "training.png", title=f"seed {seed}")
    num_samples = done.count * trainee.num_samples
    return SeedRun(test, history, output / "checkpoint", num_samples)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The samples of an epoch, each once, in an order of its own."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(num_samples, generator=generator)


def item_table(
    config: RunConfig, num_items: int, seed: int, device: torch.device
) -> torchembed.Embedding:
    """A row for each item; seeds the generator that dense layers are drawn from, too."""
    torch.manual_seed(seed)
    items = torchembed.Embedding(num_items, config.embedding_dim, device=device, seed=seed)
    std = config.embedding_std
    nn.init.trunc_normal_(items.weight, std=std, a=-2 * std, b=2 * std)
    return items


def build_optimizers(config: RunConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for the item table and for all else.

    Negatives are so many that nearly every row is looked up in a step; the others keep their place,
    which torch's Adam would go on moving.
    """
    tables, dense = torchembed.optim.split_parameters(model.parameters())
    lr = config.learning_rate
    return [
        torchembed.optim.Adam(tables, lr=lr, betas=_BETAS),
        torchembed.optim.DenseAdam(dense, lr=lr, betas=_BETAS),
    ]
