"""Training an encoder of histories, once for each seed."""

from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import nn

import torchembed
from recipes.data_folder import find_data
from recipes.ranks import shard_over_ranks
from recipes.result import RankingResult, Stopped
from recipes.sequences.config import Encoder, SequenceConfig
from recipes.sequences.evaluate import evaluate
from recipes.sequences.interactions import FILES, Interactions, read
from recipes.sequences.packed import HELD_OUT, HistoryWindows, PackedBatches, needed_capacity
from torchembed.core import ranks
from torchembed.models import HSTU, NextItem, SASRec
from torchembed.training import (
    CheckpointFolder,
    History,
    MetricsWriter,
    Progress,
    RankingEvaluation,
    StopSignal,
    TrainingRun,
    TrainPipeline,
    train,
)

_BETAS = (0.9, 0.98)


class SeedRun(NamedTuple):
    """One training."""

    test: RankingEvaluation
    history: History
    checkpoint: Path


def sasrec(data: str | Path | None = None) -> SequenceConfig:
    """SASRec on MovieLens-1M: each user's last movie, ranked among all.

    The data are GroupLens' ml-1m as published: ratings.dat (UserID::MovieID::Rating::Timestamp) and
    movies.dat (MovieID::Title::Genres), in --data or in a folder ml-1m there. Read as well, in
    place of ratings.dat: ratings.npz with arrays user, movie and time_rank.
    """
    return SequenceConfig(data=data, encoder=Encoder.SASREC)


def hstu(data: str | Path | None = None) -> SequenceConfig:
    """HSTU on MovieLens-1M: each user's last movie, ranked among all.

    The data are those of the recipe sasrec. Its attention goes by the times of ratings where these
    are there, in ratings.dat; ratings.npz has their order alone.
    """
    return SequenceConfig(data=data, encoder=Encoder.HSTU)


def run(config: SequenceConfig, device: torch.device, output: Path) -> RankingResult | Stopped:
    """Train once for each seed; the result is the mean, and the last one's checkpoint."""
    if config.batch_size % ranks.world_size():
        raise ValueError(
            f"batch_size must be a multiple of the {ranks.world_size()} ranks, "
            f"got {config.batch_size}"
        )
    data = read(find_data(*FILES, data=config.data))
    runs: dict[int, SeedRun] = {}
    for seed in config.seeds:
        found = run_seed(config, data, seed, device, output / f"seed-{seed}")
        if isinstance(found, Stopped):
            return found
        runs[seed] = found
    tests = [found.test for found in runs.values()]
    seconds = sum(found.history.seconds for found in runs.values())
    return RankingResult(
        hr_10=fmean(test.hit_rate[10] for test in tests),
        ndcg_10=fmean(test.ndcg[10] for test in tests),
        hr_50=fmean(test.hit_rate[50] for test in tests),
        hr_200=fmean(test.hit_rate[200] for test in tests),
        hr_10_by_seed={seed: found.test.hit_rate[10] for seed, found in runs.items()},
        ndcg_10_by_seed={seed: found.test.ndcg[10] for seed, found in runs.items()},
        samples_per_second=data.num_users * config.epochs * len(runs) / seconds,
        num_steps=sum(found.history.num_steps for found in runs.values()),
        checkpoint=runs[config.seeds[-1]].checkpoint,
    )


def run_seed(
    config: SequenceConfig, data: Interactions, seed: int, device: torch.device, output: Path
) -> SeedRun | Stopped:
    """Train for all epochs; goes on after the last evaluation that is in ``checkpoint``."""
    model = build_model(config, data.num_items, seed, device)
    optimizers = build_optimizers(config, model)
    # Dropout and negatives differ from rank to rank; all else that is random is the same on each.
    torch.manual_seed(seed + 1000 * (1 + ranks.rank()))
    generator = torch.Generator().manual_seed(seed)
    epochs = range(config.epochs)
    orders = torch.stack([torch.randperm(data.num_users, generator=generator) for _ in epochs])
    windows, held_out = (
        HistoryWindows(data, max_length=config.max_length, num_left_out=num_left_out)
        for num_left_out in (HELD_OUT, 0)
    )
    sizes = {"batch_size": config.batch_size, "num_ranks": ranks.world_size()}
    capacity = needed_capacity(windows, orders, **sizes)
    num_batches = -(-data.num_users // config.batch_size)
    history = History(read_loss_every=10)
    checkpoints = CheckpointFolder(output / "checkpoint", keep=1)
    checkpoints.claim()
    state = TrainingRun(model=model, optimizers=optimizers, others={"history": history})
    checkpoints.load(state)
    output.mkdir(exist_ok=True)
    test: RankingEvaluation | None = None
    with (
        StopSignal() as stop,
        Progress(
            total=config.epochs * num_batches, done=history.num_steps, label=f"seed {seed}"
        ) as progress,
        MetricsWriter(output, after_step=history.num_steps) as metrics,
        TrainPipeline(model, None, optimizers, autocast=config.precision.autocast) as pipeline,
    ):
        for epoch in epochs[history.num_steps // num_batches :]:
            batches = PackedBatches(
                windows, orders[epoch], capacity=capacity, rank=ranks.rank(), **sizes
            )
            train(pipeline, batches, history=history, progress=progress, metrics=metrics, stop=stop)
            if stop.is_agreed:
                return Stopped(num_steps=history.num_steps)
            if (epoch + 1) % config.evaluate_every and epoch + 1 < config.epochs:
                continue
            test = evaluate(model, held_out, precision=config.precision, device=device)
            metrics.write(history.num_steps, **test.scalars())
            progress.note(
                f"seed {seed}, epoch {epoch + 1}: training loss {history.losses[-1].loss:.4f}, "
                f"HR@10 {test.hit_rate[10]:.4f}, NDCG@10 {test.ndcg[10]:.4f}"
            )
            checkpoints.save(history.num_steps, state)
    if test is None:  # all epochs were trained before
        test = evaluate(model, held_out, precision=config.precision, device=device)
    return SeedRun(test, history, output / "checkpoint")


def build_model(
    config: SequenceConfig, num_items: int, seed: int, device: torch.device
) -> NextItem:
    """The encoder with its item table, spread over the ranks."""
    torch.manual_seed(seed)
    items = torchembed.Embedding(num_items, config.embedding_dim, device=device, seed=seed)
    std = config.embedding_std
    nn.init.trunc_normal_(items.weight, std=std, a=-2 * std, b=2 * std)
    encoder_class = {Encoder.SASREC: SASRec, Encoder.HSTU: HSTU}[config.encoder]
    encoder = encoder_class(
        items,
        embedding_dim=config.embedding_dim,
        max_length=config.max_length,
        num_blocks=config.num_blocks,
        num_heads=config.num_heads,
        dropout=config.dropout,
        dense_device=device,
    )
    model = NextItem(
        encoder,
        num_items=num_items,
        num_negatives=config.num_negatives,
        temperature=config.temperature,
    )
    shard_over_ranks(model, device, torchembed.optim.Adam)
    return model


def build_optimizers(config: SequenceConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for the item table and for all else.

    The negatives of a step are so many that every row is among them, but for a few chances: rows
    that a step does not look up keep their place, which torch's Adam would go on moving.
    """
    tables, dense = torchembed.optim.split_parameters(model.parameters())
    lr = config.learning_rate
    return [
        torchembed.optim.Adam(tables, lr=lr, betas=_BETAS),
        torchembed.optim.DenseAdam(dense, lr=lr, betas=_BETAS),
    ]
