"""Training a model of several tasks with early stopping, once for each seed."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchembed
from recipes.ctr.rows import RowBatches, Rows
from recipes.ctr.splits import Splits
from recipes.ranks import shard_over_ranks, table_device
from recipes.result import Stopped, TasksResult
from recipes.tasks.config import Architecture, TasksConfig
from torchembed.core import ranks
from torchembed.models import PLE, MMoE, SharedBottom
from torchembed.training import (
    CheckpointFolder,
    EarlyStop,
    History,
    MetricsWriter,
    MultiTaskLoss,
    Progress,
    StopSignal,
    Task,
    TaskEvaluations,
    TrainingRun,
    TrainPipeline,
    average_buffers,
    evaluate,
    plot_history,
    train,
)


class SeedRun(NamedTuple):
    """One training, its model as good on the validation rows as it got."""

    validation_score: float
    test: TaskEvaluations
    history: History
    checkpoint: Path


def chosen_tasks(config: TasksConfig, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Those of the data's ``tasks`` that are to be trained.

    Raises:
        ValueError: for a name of none of them, or a task to stop on that is not trained.
    """
    known = [task.name for task in tasks]
    unknown = [name for name in config.tasks if name not in known]
    if unknown:
        raise ValueError(f"tasks must be of {known}, or none for all of them, got {unknown}")
    found = tuple(task for task in tasks if not config.tasks or task.name in config.tasks)
    names = [task.name for task in found]
    if config.stop_on is not None and config.stop_on not in names:
        raise ValueError(
            f"stop_on must be one of the tasks {names}, or left out for their mean, got "
            f"{config.stop_on}"
        )
    return found


def run_seeds(
    config: TasksConfig,
    tasks: Sequence[Task],
    read: Callable[[int], Splits],
    device: torch.device,
    output: Path,
) -> TasksResult | Stopped:
    """Train once for each seed; the result is the mean, and the best one's checkpoint.

    Args:
        tasks: those to train.
        read: from a seed to the divided rows, whose labels are of the tasks alone.
        device: this rank's.
        output: for a folder of each seed with ``checkpoint``, its best, ``newest``, from which it
            goes on, ``metrics.jsonl`` and ``training.png``.
    """
    if config.batch_size % ranks.world_size():
        raise ValueError(
            f"batch_size must be a multiple of the {ranks.world_size()} ranks, "
            f"got {config.batch_size}"
        )
    runs: dict[int, SeedRun] = {}
    for seed in config.seeds:
        run = run_seed(config, tasks, read(seed), seed, device, output / f"seed-{seed}")
        if isinstance(run, Stopped):
            return run
        runs[seed] = run
    by_seed = {seed: run.test.scalars() for seed, run in runs.items()}
    histories = [run.history for run in runs.values()]
    best = max(runs.values(), key=lambda run: run.validation_score)
    return TasksResult(
        test={
            name: fmean(scalars[name] for scalars in by_seed.values())
            for name in by_seed[config.seeds[0]]
        },
        test_by_seed=by_seed,
        samples_per_second=sum(history.num_samples for history in histories)
        / sum(history.seconds for history in histories),
        num_steps=sum(history.num_steps for history in histories),
        checkpoint=best.checkpoint,
    )


def run_seed(
    config: TasksConfig,
    tasks: Sequence[Task],
    splits: Splits,
    seed: int,
    device: torch.device,
    output: Path,
) -> SeedRun | Stopped:
    """Train until the score on the validation rows has not improved for some epochs.

    It goes on after the last whole epoch that is in ``newest``.
    """
    model = build_model(config, tasks, splits.rows, seed, device)
    optimizers = build_optimizers(config, model)
    # Dropout differs from rank to rank; all else that is random is drawn the same on each.
    torch.manual_seed(seed + 1000 * (1 + ranks.rank()))

    def batches(numbers: Tensor) -> RowBatches:
        rank, num_ranks = ranks.rank(), ranks.world_size()
        return RowBatches(
            splits.rows, numbers, batch_size=config.batch_size, rank=rank, num_ranks=num_ranks
        )

    def quality(numbers: Tensor) -> TaskEvaluations:
        average_buffers(model)
        with config.precision.context(device):
            return evaluate(model, batches(numbers), tasks=tasks)

    history = History(read_loss_every=10)
    early_stop = EarlyStop(
        patience=config.patience,
        min_improvement=config.min_improvement,
        score_name=config.stop_on or "mean score",
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
            model, MultiTaskLoss(tasks), optimizers, autocast=config.precision.autocast
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
            now = quality(splits.validation)
            history.add_evaluation(now)
            scalars = now.scalars()
            metrics.write(
                history.num_steps,
                **{f"validation/{name}": value for name, value in scalars.items()},
            )
            described = ", ".join(f"{name} {value:.5f}" for name, value in scalars.items())
            progress.note(
                f"seed {seed}, epoch {epoch + 1}: training loss {history.losses[-1].loss:.4f}, "
                f"validation {described}"
            )
            if early_stop.update(history.num_steps, now.score(config.stop_on)):
                best.save(history.num_steps, trained)
            elif early_stop.reason is None:
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] *= config.lr_decay
            newest.save(history.num_steps, state)
            if early_stop.reason is not None:
                break
    if early_stop.best_auc is None:
        raise ValueError("the validation rows must have different labels, or there is no score")
    best.load(TrainingRun(model=model), early_stop.best_step)
    if ranks.rank() == 0:
        title = f"{config.architecture.value}, seed {seed}"
        plot_history(history, output / "training.png", title=title)
    return SeedRun(early_stop.best_auc, quality(splits.test), history, output / "checkpoint")


def build_model(
    config: TasksConfig, tasks: Sequence[Task], rows: Rows, seed: int, device: torch.device
) -> nn.Module:
    """The model with a table for each feature, spread over the ranks; bags are averaged."""
    torch.manual_seed(seed)
    tables = torchembed.EmbeddingBagCollection(
        [
            torchembed.EmbeddingBagConfig(
                name=name,
                num_embeddings=feature.num_ids,
                embedding_dim=config.embedding_dim,
                feature_names=(name,),
                pooling=torchembed.Pooling.MEAN,
                initializer=torchembed.Normal(std=config.embedding_std),
            )
            for name, feature in rows.features.items()
        ],
        device=table_device(device),
        seed=seed,
        output_dtype=config.precision.value,
    )
    alike: dict[str, Any] = {
        "task_names": [task.name for task in tasks],
        "tower_layer_sizes": config.tower_layer_sizes,
        "dropout": config.dropout,
        "dense_device": device,
    }
    of_experts: dict[str, Any] = {"expert_layer_sizes": config.expert_layer_sizes}
    match config.architecture:
        case Architecture.SHARED_BOTTOM:
            sizes = config.bottom_layer_sizes
            model: nn.Module = SharedBottom(tables, **alike, bottom_layer_sizes=sizes)
        case Architecture.MMOE:
            model = MMoE(tables, **alike, **of_experts, num_experts=config.num_experts)
        case Architecture.PLE:
            model = PLE(
                tables,
                **alike,
                **of_experts,
                num_levels=config.num_levels,
                num_task_experts=config.num_task_experts,
                num_shared_experts=config.num_shared_experts,
            )
    shard_over_ranks(model, device, torchembed.optim.Adam, config.placement)
    return model


def build_optimizers(config: TasksConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for the tables, of which those rows move that a batch looked up, and for all else."""
    tables, dense = torchembed.optim.split_parameters(model.parameters())
    return [
        torchembed.optim.Adam(tables, lr=config.learning_rate),
        torchembed.optim.DenseAdam(dense, lr=config.learning_rate),
    ]
