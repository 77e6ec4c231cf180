"""Training DLRM-DCNv2."""

import os
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import torchembed
from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.ranks import shard_over_ranks, table_device
from recipes.result import Result
from torchembed.data import (
    BackgroundLoader,
    BatchSource,
    ClickLog,
    CriteoText,
    MlperfDays,
    Split,
    open_clicks,
)
from torchembed.models import DLRM_DCNv2
from torchembed.tables import table_of
from torchembed.training import (
    CheckpointFolder,
    History,
    Progress,
    TrainingRun,
    evaluate,
    plot_history,
    ranks,
    train,
)


def run(config: DlrmConfig, device: torch.device, output: Path) -> Result:
    """Train, evaluate on validation rows along the way, and end with the test rows.

    Args:
        device: this rank's.
        output: an empty folder, for ``checkpoint`` and ``training.png``.
    """
    train_rows, validation, test = (
        open_split(config, split) for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)
    )
    model = build_model(config, train_rows, device)
    optimizers = build_optimizers(config, model)
    history = History(read_loss_every=config.read_loss_every)
    _train_and_evaluate(config, model, optimizers, train_rows, validation, history)
    final = evaluate(model, test)
    bayes_auc = test.bayes_auc() if isinstance(test, ClickLog) else None
    trained = TrainingRun(model=model, optimizers=optimizers)
    CheckpointFolder(output / "checkpoint", keep=1).save(history.num_steps, trained)
    if ranks.rank() == 0:
        best = validation.bayes_auc() if isinstance(validation, ClickLog) else None
        plot_history(history, output / "training.png", title="DLRM-DCNv2", bayes_auc=best)
    return Result(
        test_auc=final.auc,
        test_logloss=final.logloss,
        bayes_auc=bayes_auc,
        samples_per_second=history.samples_per_second,
        num_steps=history.num_steps,
        checkpoint=output / "checkpoint",
    )


def open_split(config: DlrmConfig, split: Split) -> BatchSource:
    """This rank's batches of ``split``, with tables that are not larger than the config allows."""
    num_ranks, rank = ranks.world_size(), ranks.rank()
    if config.batch_size % num_ranks:
        raise ValueError(
            f"batch_size must be a multiple of the {num_ranks} ranks, got {config.batch_size}"
        )
    share = {"batch_size": config.batch_size // num_ranks, "rank": rank, "world_size": num_ranks}
    if config.data is None:
        return ClickLog(config.click_log, split=split, **share)
    rows = {"split": split, "held_out": config.held_out, **share}
    sizes = _capped(config.table_sizes, config.max_table_rows)
    source = open_clicks(config.data, table_sizes=sizes, **rows)
    if _capped(source.table_sizes, config.max_table_rows) != source.table_sizes:
        sizes = _capped(source.table_sizes, config.max_table_rows)
        return MlperfDays(config.data, table_sizes=sizes, **rows)
    return source


def _capped(table_sizes: Sequence[int], most: int | None) -> tuple[int, ...]:
    return tuple(size if most is None else min(size, most) for size in table_sizes)


def build_model(config: DlrmConfig, source: BatchSource, device: torch.device) -> DLRM_DCNv2:
    """The model for the features of ``source``, its tables spread over the ranks."""
    check_memory(sum(source.table_sizes) * config.embedding_dim, device)
    torch.manual_seed(config.seed)
    tables = torchembed.EmbeddingBagCollection(
        [
            torchembed.EmbeddingBagConfig(
                name=key,
                num_embeddings=size,
                embedding_dim=config.embedding_dim,
                feature_names=(key,),
            )
            for key, size in zip(source.keys, source.table_sizes, strict=True)
        ],
        device=table_device(device),
        seed=config.seed,
    )
    model = DLRM_DCNv2(
        tables,
        source.num_dense,
        config.dense_arch,
        config.over_arch,
        config.num_cross_layers,
        config.low_rank,
        dense_device=device,
    )
    shard_over_ranks(model, device, config.placement)
    return model


def check_memory(num_elements: int, device: torch.device) -> None:
    """Raise ``MemoryError`` where tables and Adagrad's state exceed the machine's or the GPUs'.

    On the CPU the system would end the process without a word.
    """
    needed = num_elements * 2 * torch.float32.itemsize
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1] * ranks.world_size()
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise MemoryError(
            f"tables and their optimizer state take {needed / 1e9:.0f} GB, and there are "
            f"{there / 1e9:.0f} GB; lower max_table_rows or embedding_dim"
        )


def build_optimizers(config: DlrmConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adagrad for the tables and for all else, with one learning rate."""
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    lr, eps = config.learning_rate, config.eps
    return [
        torchembed.optim.Adagrad(tables, lr=lr, eps=eps),
        torch.optim.Adagrad(dense, lr=lr, eps=eps),
    ]


def _train_and_evaluate(
    config: DlrmConfig,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    train_rows: BatchSource,
    validation: BatchSource,
    history: History,
) -> None:
    # Text knows its number of rows only after a pass over all of it.
    num_steps = None if isinstance(train_rows, CriteoText) else len(train_rows) * config.epochs
    if config.max_steps is not None:
        num_steps = min(num_steps or config.max_steps, config.max_steps)
    schedulers = [
        LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (config.warmup_steps + 1)))
        for optimizer in optimizers
    ]
    with Progress(num_steps) as progress, BackgroundLoader(train_rows) as loader:
        batches = chain.from_iterable(repeat(loader, config.epochs))
        while True:
            num_before = history.num_steps
            train(
                model,
                F.binary_cross_entropy_with_logits,
                optimizers,
                batches,
                schedulers=schedulers,
                max_steps=_steps_until_evaluation(config, num_before),
                history=history,
                progress=progress,
            )
            if history.num_steps == num_before:
                return
            held_out = evaluate(model, validation)
            history.add_evaluation(held_out)
            progress.note(
                f"step {history.num_steps}: training loss {history.losses[-1].loss:.4f}, "
                f"validation AUC {held_out.auc:.5f}, log loss {held_out.logloss:.4f}"
            )


def _steps_until_evaluation(config: DlrmConfig, num_done: int) -> int | None:
    left = None if config.max_steps is None else config.max_steps - num_done
    return min((n for n in (config.evaluate_every, left) if n is not None), default=None)
