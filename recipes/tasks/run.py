"""Training a model of several tasks with early stopping, once for each seed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import torchembed
from recipes.ctr.early_stopped import Report, SeedRun, Trainee, train_early_stopped
from recipes.ctr.served import served_best
from recipes.ctr.splits import Splits
from recipes.ranks import check_batch_size, shard_over_ranks, table_device
from recipes.result import Stopped, TasksResult
from recipes.seeds import train_each_seed
from recipes.served_run import ServedRun
from recipes.tasks.config import Architecture, TasksConfig
from torchembed.models import PLE, MMoE, SharedBottom
from torchembed.models.task_towers import TaskTowers
from torchembed.training import MultiTaskLoss, Task, TaskEvaluations, TaskKind, evaluate

_OUTPUTS = {TaskKind.BINARY: "sigmoid", TaskKind.REGRESSION: "as_it_is"}


def chosen_tasks(config: TasksConfig, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks to train, of the data's ``tasks``.

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
    check_batch_size(config.batch_size)

    def run_seed(seed: int, folder: Path) -> SeedRun[TaskEvaluations] | Stopped:
        trainee = _prepared(config, tasks, read(seed), seed, device)
        return train_early_stopped(config, trainee, seed, device, folder)

    runs = train_each_seed(config.seeds, run_seed, output)
    if isinstance(runs, Stopped):
        return runs
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


def _prepared(
    config: TasksConfig, tasks: Sequence[Task], splits: Splits, seed: int, device: torch.device
) -> Trainee[TaskEvaluations]:
    model = build_model(config, tasks, splits, seed, device)
    return Trainee(
        title=config.architecture.value,
        model=model,
        loss_fn=MultiTaskLoss(tasks),
        optimizers=build_optimizers(config, model),
        splits=splits,
        evaluate=lambda batches: evaluate(model, batches, tasks=tasks),
        report=lambda now: _report(now, config.stop_on),
        score_name=config.stop_on or "mean score",
    )


def _report(now: TaskEvaluations, stop_on: str | None) -> Report:
    scalars = now.scalars()
    return Report(
        score=now.score(stop_on),
        metrics={f"validation/{name}": value for name, value in scalars.items()},
        description=", ".join(f"{name} {value:.5f}" for name, value in scalars.items()),
    )


def served_tasks(
    config: TasksConfig, tasks: Sequence[Task], read: Callable[[int], Splits], output: Path
) -> ServedRun:
    """The best seed's model, which gives a probability or a number for each task by its name, asked
    of the first test rows.

    Args:
        tasks: those that were trained.
        read: from a seed to the divided rows.
        output: of the run.
    """

    def build(seed: int) -> nn.Module:
        return build_model(config, tasks, read(seed), seed, torch.device("cpu"))

    outputs = {task.name: _OUTPUTS[task.kind] for task in tasks}
    return served_best(config, read, build, output)._replace(output=outputs)


def build_model(
    config: TasksConfig, tasks: Sequence[Task], splits: Splits, seed: int, device: torch.device
) -> TaskTowers:
    """The model with a table for each feature, spread over the ranks; bags are averaged. Its
    outputs start at the means of the labels to train on."""
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
            for name, feature in splits.rows.features.items()
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
            model: TaskTowers = SharedBottom(tables, **alike, bottom_layer_sizes=sizes)
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
    labels = splits.rows.labels
    model.start_at(
        {task.name: _mean_output(task, labels[task.name][splits.train]) for task in tasks}
    )
    shard_over_ranks(model, device, torchembed.optim.Adam, config.placement)
    return model


def _mean_output(task: Task, labels: Tensor) -> float:
    """The output that predicts the mean of ``labels``."""
    mean = labels.double().mean()
    return float(mean.logit() if task.kind is TaskKind.BINARY else mean)


def build_optimizers(config: TasksConfig, model: TaskTowers) -> list[torch.optim.Optimizer]:
    """Adam for the tables, of which those rows move that a batch looked up, and for all else."""
    tables, dense = torchembed.optim.split_parameters(model.parameters())
    return [
        torchembed.optim.Adam(tables, lr=config.learning_rate),
        torchembed.optim.DenseAdam(dense, lr=config.learning_rate),
    ]
