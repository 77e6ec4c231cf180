"""Training a model of clicks with early stopping, once for each seed."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torchembed
from recipes.ctr.config import CtrConfig
from recipes.ctr.rows import RowBatches
from recipes.ctr.splits import Splits
from recipes.ctr.tables import rows_in_tables
from recipes.dynamic import DEFAULT_EVICTION, DEFAULT_SHARED, table_size
from recipes.ranks import shard_over_ranks, table_device
from recipes.result import Result, Stopped
from torchembed.core import ranks
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.tables import table_of
from torchembed.training import (
    CheckpointFolder,
    EarlyStop,
    Evaluation,
    History,
    MetricsWriter,
    Progress,
    StopSignal,
    TrainingRun,
    TrainPipeline,
    average_buffers,
    evaluate,
    plot_history,
    train,
)


class SeedRun(NamedTuple):
    """One training, its model as good on the validation rows as it got."""

    validation_auc: float
    test: Evaluation
    history: History
    checkpoint: Path


def run_seeds(
    config: CtrConfig, read: Callable[[int], Splits], device: torch.device, output: Path
) -> Result | Stopped:
    """Train once for each seed; the result is the mean, and the best one's checkpoint.

    Args:
        read: from a seed to the divided rows.
        device: this rank's.
        output: for a folder of each seed with ``checkpoint``, its best, ``newest``, from which it
            goes on, ``metrics.jsonl`` and ``training.png``; and for ``modulo``, a folder with those
            of static tables beside dynamic ones.
    """
    if config.batch_size % ranks.world_size():
        raise ValueError(
            f"batch_size must be a multiple of the {ranks.world_size()} ranks, "
            f"got {config.batch_size}"
        )
    runs = _runs_of(config, read, device, output)
    if isinstance(runs, Stopped):
        return runs
    modulo: dict[int, SeedRun] | Stopped = {}
    if config.beside_modulo and config.dynamic and config.capacity is not None:
        static = dataclasses.replace(
            config, dynamic=False, eviction=DEFAULT_EVICTION, shared=DEFAULT_SHARED
        )
        modulo = _runs_of(static, read, device, output / "modulo")
        if isinstance(modulo, Stopped):
            return modulo
    histories = [run.history for run in runs.values()]
    best = max(runs.values(), key=lambda run: run.validation_auc)
    return Result(
        test_auc=fmean(run.test.auc for run in runs.values()),
        test_logloss=fmean(run.test.logloss for run in runs.values()),
        test_auc_by_seed={seed: run.test.auc for seed, run in runs.items()},
        test_logloss_by_seed={seed: run.test.logloss for seed, run in runs.items()},
        modulo_auc=fmean(run.test.auc for run in modulo.values()) if modulo else None,
        modulo_logloss=fmean(run.test.logloss for run in modulo.values()) if modulo else None,
        modulo_auc_by_seed={seed: run.test.auc for seed, run in modulo.items()} or None,
        samples_per_second=sum(history.num_samples for history in histories)
        / sum(history.seconds for history in histories),
        num_steps=sum(history.num_steps for history in histories),
        checkpoint=best.checkpoint,
    )


def _runs_of(
    config: CtrConfig, read: Callable[[int], Splits], device: torch.device, output: Path
) -> dict[int, SeedRun] | Stopped:
    """A training for each seed, in a folder of ``output`` each."""
    runs: dict[int, SeedRun] = {}
    for seed in config.seeds:
        run = run_seed(config, read(seed), seed, device, output / f"seed-{seed}")
        if isinstance(run, Stopped):
            return run
        runs[seed] = run
    return runs


def run_seed(
    config: CtrConfig, splits: Splits, seed: int, device: torch.device, output: Path
) -> SeedRun | Stopped:
    """Train until the AUC on the validation rows has not improved for some epochs.

    It goes on after the last whole epoch that is in ``newest``.
    """
    rows, num_rows = rows_in_tables(config, splits.rows)
    model = build_model(config, num_rows, seed, device, num_dense=rows.num_dense)
    optimizers = build_optimizers(config, model)
    # Dropout differs from rank to rank; all else that is random is drawn the same on each.
    torch.manual_seed(seed + 1000 * (1 + ranks.rank()))

    def batches(numbers: Tensor) -> RowBatches:
        rank, num_ranks = ranks.rank(), ranks.world_size()
        return RowBatches(
            rows, numbers, batch_size=config.batch_size, rank=rank, num_ranks=num_ranks
        )

    history = History(read_loss_every=10)
    early_stop = EarlyStop(patience=config.patience, min_improvement=config.min_improvement)
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
            binary_cross_entropy,
            optimizers,
            autocast=config.precision.autocast,
            max_grad_norm=config.max_grad_norm,
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
            with config.precision.context(device):
                now = evaluate(model, batches(splits.validation))
            history.add_evaluation(now)
            metrics.write(history.num_steps, validation_auc=now.auc, validation_logloss=now.logloss)
            progress.note(
                f"seed {seed}, epoch {epoch + 1}: training loss {history.losses[-1].loss:.4f}, "
                f"validation AUC {now.auc:.5f}, log loss {now.logloss:.4f}"
            )
            if early_stop.update(history.num_steps, now.auc):
                best.save(history.num_steps, trained)
            elif early_stop.reason is None:
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] *= config.lr_decay
            newest.save(history.num_steps, state)
            if early_stop.reason is not None:
                break
    if early_stop.best_auc is None:
        raise ValueError("the validation rows must have labels of both kinds, or there is no AUC")
    best.load(TrainingRun(model=model), early_stop.best_step)
    if ranks.rank() == 0:
        plot_history(history, output / "training.png", title=f"{config.title}, seed {seed}")
    with config.precision.context(device):
        test = evaluate(model, batches(splits.test))
    return SeedRun(early_stop.best_auc, test, history, output / "checkpoint")


def build_model(
    config: CtrConfig,
    num_rows: Mapping[str, int],
    seed: int,
    device: torch.device,
    *,
    num_dense: int = 0,
) -> nn.Module:
    """The model with tables of ``num_rows`` for each feature, spread over the ranks; bags are
    averaged."""
    torch.manual_seed(seed)
    evicts = config.capacity is not None
    sizes = {
        name: table_size(
            size,
            is_dynamic=config.dynamic,
            evicts=evicts,
            eviction=config.eviction,
            shared=config.shared,
        )
        for name, size in num_rows.items()
    }

    def collection(embedding_dim: int, suffix: str = "") -> torchembed.EmbeddingBagCollection:
        return torchembed.EmbeddingBagCollection(
            [
                torchembed.EmbeddingBagConfig(
                    name=name + suffix,
                    num_embeddings=size.num_embeddings,
                    embedding_dim=embedding_dim,
                    feature_names=(name,),
                    pooling=torchembed.Pooling.MEAN,
                    initializer=torchembed.Normal(std=config.embedding_std),
                    dynamic=size.dynamic,
                )
                for name, size in sizes.items()
            ],
            device=table_device(device),
            seed=seed,
            output_dtype=config.precision.value,
        )

    model = config.build(collection, num_dense, device)
    shard_over_ranks(model, device, torchembed.optim.Adam, config.placement)
    return model


def build_optimizers(config: CtrConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for the tables and for all else.

    The penalty ``l2 / 2 * sum of squares`` covers every row at every step, looked up or not, so
    with it every row moves at every step: that is torch's own Adam, over dense gradients. Without
    it, and in tables that evict, whose rows only torchembed's optimizers give back, those rows move
    that a batch looked up, in the fused update.
    """
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    lr = config.learning_rate
    evicts = config.dynamic and config.capacity is not None
    if config.embedding_l2 and not evicts:
        of_tables: torch.optim.Optimizer = torch.optim.Adam(
            tables, lr=lr, weight_decay=config.embedding_l2
        )
    else:
        of_tables = torchembed.optim.Adam(tables, lr=lr, weight_decay=config.embedding_l2)
    return [of_tables, torchembed.optim.DenseAdam(dense, lr=lr)]
