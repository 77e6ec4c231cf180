"""Training a model of clicks with early stopping, once for each seed."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import torchembed
from recipes.ctr.config import CtrConfig
from recipes.ctr.early_stopped import Report, SeedRun, Trainee, train_early_stopped
from recipes.ctr.splits import Splits
from recipes.ctr.tables import rows_in_tables
from recipes.dynamic import DEFAULT_EVICTION, DEFAULT_SHARED, table_size
from recipes.precision import wire_precision
from recipes.ranks import check_batch_size, shard_over_ranks, table_device
from recipes.result import Result, Stopped
from recipes.seeds import train_each_seed
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.tables import table_of
from torchembed.training import Evaluation, evaluate


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
    check_batch_size(config.batch_size)
    runs = _runs_of(config, read, device, output)
    if isinstance(runs, Stopped):
        return runs
    modulo: dict[int, SeedRun[Evaluation]] | Stopped = {}
    if config.beside_modulo and config.dynamic and config.capacity is not None:
        static = dataclasses.replace(
            config, dynamic=False, eviction=DEFAULT_EVICTION, shared=DEFAULT_SHARED
        )
        modulo = _runs_of(static, read, device, output / "modulo")
        if isinstance(modulo, Stopped):
            return modulo
    histories = [run.history for run in runs.values()]
    best = max(runs.values(), key=lambda run: run.validation_score)
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
) -> dict[int, SeedRun[Evaluation]] | Stopped:
    """A training for each seed, in a folder of ``output`` each."""

    def run_seed(seed: int, folder: Path) -> SeedRun[Evaluation] | Stopped:
        trainee = _prepared(config, read(seed), seed, device)
        return train_early_stopped(config, trainee, seed, device, folder)

    return train_each_seed(config.seeds, run_seed, output)


def _prepared(
    config: CtrConfig, splits: Splits, seed: int, device: torch.device
) -> Trainee[Evaluation]:
    rows, num_rows = rows_in_tables(config, splits.rows)
    model = build_model(config, num_rows, seed, device, num_dense=rows.num_dense)
    return Trainee(
        title=config.title,
        model=model,
        loss_fn=binary_cross_entropy,
        optimizers=build_optimizers(config, model),
        max_grad_norm=config.max_grad_norm,
        splits=splits._replace(rows=rows),
        evaluate=lambda batches: evaluate(model, batches),
        report=_report,
        score_name="AUC",
    )


def _report(now: Evaluation) -> Report:
    return Report(
        score=now.auc,
        metrics={"validation_auc": now.auc, "validation_logloss": now.logloss},
        description=f"AUC {now.auc:.5f}, log loss {now.logloss:.4f}",
    )


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
    wire = wire_precision(config.wire_forward, config.wire_backward)
    shard_over_ranks(model, device, torchembed.optim.Adam, config.placement, wire=wire)
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
