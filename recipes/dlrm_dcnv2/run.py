"""Training DLRM-DCNv2."""

import dataclasses
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchembed
from recipes.budgets import placed
from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.days import DailyLoop, day_files
from recipes.dlrm_dcnv2.loop import TrainLoop
from recipes.dynamic import num_rows, table_size
from recipes.host_memory import storages
from recipes.mlperf_log import MlperfLog
from recipes.precision import wire_precision
from recipes.ranks import check_batch_size, shard_over_ranks, table_device
from recipes.result import Result, Stopped
from torchembed.core import ranks
from torchembed.data import (
    BackgroundLoader,
    BatchSource,
    ClickLog,
    CriteoText,
    MlperfDays,
    Split,
    open_clicks,
)
from torchembed.data.data_path import DataPath
from torchembed.models import DLRM_DCNv2
from torchembed.tables import table_of
from torchembed.training import (
    CheckpointFolder,
    DiskReadAhead,
    History,
    TrainingRun,
    evaluate,
    plot_history,
)


def check(config: DlrmConfig, num_ranks: int) -> None:
    """Open the data, and read none of their rows.

    Raises:
        FileNotFoundError: where the folder lacks files.
        ValueError: where the ranks cannot divide a batch evenly, or files are not as they must be.
    """
    check_batch_size(config.batch_size, num_ranks)
    if config.data is None:
        return
    try:
        if config.daily:
            day_files(config.data)
        open_clicks(config.data, batch_size=1, table_sizes=config.table_sizes)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; name a folder of text, Parquet or MLPerf's files with --data"
        ) from error


def run(config: DlrmConfig, device: torch.device, output: Path) -> Result | Stopped:
    """Train, evaluate on validation rows along the way, and end with the test rows.

    Args:
        device: this rank's.
        output: a folder for ``checkpoint``, ``metrics.jsonl`` and ``training.png``; a training of
            which a checkpoint is there goes on from it.
    """
    if config.mlperf_log is not None and CheckpointFolder(output / "checkpoint").steps():
        raise ValueError(
            f"mlperf_log must be left out where a run goes on, and {output} holds a checkpoint: "
            "MLPerf knows whole runs alone"
        )
    if config.daily:
        return run_days(config, device, output)
    mlperf_log = None if config.mlperf_log is None else MlperfLog(output)
    train_rows, validation, test = (
        open_split(config, split) for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)
    )
    if mlperf_log is not None:
        mlperf_log.describe(
            division=config.mlperf_log or "",
            org=config.mlperf_org,
            platform=_platform(device),
            values=_mlperf_values(config, train_rows, validation),
        )
    model = build_model(config, train_rows, device)
    with (
        DiskReadAhead(model) as ahead,
        BackgroundLoader(train_rows, num_ahead=config.read_ahead, announce=ahead) as loader,
    ):
        loop = TrainLoop(
            config=config,
            model=model,
            optimizers=build_optimizers(config, model),
            loader=loader,
            validation=validation,
            # Text knows its number of rows only after a pass over all of it.
            steps_per_epoch=None if isinstance(train_rows, CriteoText) else len(train_rows),
            output=output,
            mlperf_log=mlperf_log,
        )
        if not loop.run():
            return Stopped(num_steps=loop.history.num_steps)
    if loop.has_best:
        loop.best.load(TrainingRun(model=model), loop.early_stop.best_step)
    result = _result(config, model, loop.history, (validation, test), device, output)
    if loop.has_best:
        return dataclasses.replace(result, checkpoint=output / "best")
    return result


def run_days(config: DlrmConfig, device: torch.device, output: Path) -> Result | Stopped:
    """:func:`run`, file after file of the data, each with an export in ``output / "exports"``."""
    assert config.data is not None
    files = day_files(config.data)

    def open_day(file: DataPath) -> BatchSource:
        sizes = table_rows(config, config.table_sizes)
        return open_clicks(file, table_sizes=sizes, **_reading(config))

    validation, test = (open_split(config, split) for split in (Split.VALIDATION, Split.TEST))
    model = build_model(config, open_day(files[0]), device)
    loop = DailyLoop(
        config=config,
        model=model,
        optimizers=build_optimizers(config, model),
        files=files,
        open_day=open_day,
        validation=validation,
        output=output,
    )
    if not loop.run():
        return Stopped(num_steps=loop.history.num_steps)
    return _result(config, model, loop.history, (validation, test), device, output)


def _result(
    config: DlrmConfig,
    model: nn.Module,
    history: History,
    held_out: tuple[BatchSource, BatchSource],
    device: torch.device,
    output: Path,
) -> Result:
    """The result of a run that has ended, on the test rows, the second of those held out."""
    validation, test = held_out
    with config.precision.context(device):
        final = evaluate(model, test)
    if ranks.rank() == 0:
        best = validation.bayes_auc() if isinstance(validation, ClickLog) else None
        plot_history(history, output / "training.png", title="DLRM-DCNv2", bayes_auc=best)
    return Result(
        test_auc=final.auc,
        test_logloss=final.logloss,
        bayes_auc=test.bayes_auc() if isinstance(test, ClickLog) else None,
        bayes_logloss=test.bayes_logloss() if isinstance(test, ClickLog) else None,
        samples_per_second=history.samples_per_second,
        num_steps=history.num_steps,
        checkpoint=output / "checkpoint",
    )


def _platform(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{ranks.world_size()}x {name}"


def _mlperf_values(
    config: DlrmConfig, train_rows: BatchSource, validation: BatchSource
) -> dict[str, Any]:
    """Numbers of a run that MLPerf's rules for this model ask for, by their keys."""
    decays = config.decay_steps > 0
    return {
        "seed": config.seed,
        "global_batch_size": config.batch_size,
        "gradient_accumulation_steps": 1,
        "train_samples": train_rows.num_rows,
        "eval_samples": validation.num_rows,
        "opt_name": "adagrad",
        "opt_base_learning_rate": config.learning_rate,
        "opt_adagrad_learning_rate_decay": 0,
        "opt_weight_decay": 0,
        "opt_adagrad_initial_accumulator_value": 0,
        "opt_adagrad_epsilon": config.eps,
        "opt_learning_rate_warmup_steps": config.warmup_steps,
        "opt_learning_rate_decay_start_step": config.decay_start_step if decays else 0,
        "opt_learning_rate_decay_steps": config.decay_steps,
    }


def open_split(config: DlrmConfig, split: Split) -> BatchSource:
    """This rank's batches of ``split``, with tables of as many rows as the config says, and the
    data's own ids for dynamic ones."""
    options = _reading(config)
    if config.data is None:
        sizes = table_rows(config, config.click_log.table_sizes)
        return ClickLog(config.click_log, split=split, table_sizes=sizes, **options)
    options |= {"held_out": config.held_out}
    source = open_clicks(config.data, table_sizes=config.table_sizes, split=split, **options)
    sizes = table_rows(config, source.table_sizes)
    if sizes == source.table_sizes:
        return source
    # Days may come with sizes of their own, which others replace here.
    reopen = MlperfDays if isinstance(source, MlperfDays) else open_clicks
    return reopen(config.data, table_sizes=sizes, split=split, **options)


def _reading(config: DlrmConfig) -> dict[str, Any]:
    """How this rank reads batches, whatever they are read from."""
    num_ranks, rank = ranks.world_size(), ranks.rank()
    check_batch_size(config.batch_size)
    return {
        "batch_size": config.batch_size // num_ranks,
        "rank": rank,
        "world_size": num_ranks,
        "raw_ids": config.dynamic,
    }


def table_rows(config: DlrmConfig, table_sizes: Sequence[int]) -> tuple[int, ...]:
    """Rows that the config gives tables which would have ``table_sizes``."""
    most = config.max_table_rows
    capped = (size if most is None else min(size, most) for size in table_sizes)
    return tuple(num_rows(config.capacity, size) for size in capped)


def build_model(config: DlrmConfig, source: BatchSource, device: torch.device) -> DLRM_DCNv2:
    """The model for the features of ``source``, its tables spread over the ranks."""
    budgets = config.budgets
    if device.type == "cpu" and budgets is None:
        num_elements = sum(source.table_sizes) * config.embedding_dim
        check_memory(num_elements, is_copied=config.checkpoint_every is not None)
    torch.manual_seed(config.seed)
    sizes = [
        table_size(
            size,
            is_dynamic=config.dynamic,
            evicts=config.capacity is not None,
            eviction=config.eviction,
            shared=config.shared,
            has_deltas=config.daily,
        )
        for size in source.table_sizes
    ]
    stored = storages([s.num_embeddings for s in sizes], config.cached, config.batch_size)
    configs = [
        torchembed.EmbeddingBagConfig(
            name=key,
            num_embeddings=size.num_embeddings,
            embedding_dim=config.embedding_dim,
            feature_names=(key,),
            dynamic=size.dynamic,
            storage=storage,
        )
        for key, size, storage in zip(source.keys, sizes, stored, strict=True)
    ]
    optimizer, planner = torchembed.optim.Adagrad, None
    if budgets is not None:
        planner = budgets.planner(source, device, optimizer, config.placement)
        configs = placed(configs, planner, device)
    tables = torchembed.EmbeddingBagCollection(
        configs,
        device=table_device(device),
        seed=config.seed,
        output_dtype=config.precision.value,
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
    wire = wire_precision(config.wire_forward, config.wire_backward)
    shard_over_ranks(model, device, optimizer, config.placement, planner, wire)
    return model


def check_memory(num_elements: int, *, is_copied: bool) -> None:
    """Raise ``MemoryError`` where tables and Adagrad's state, of all ranks, exceed the machine's
    memory: the system would end a process without a word. A GPU's limit is said by torch, and for
    each of several by ``shard_embeddings``.

    Args:
        is_copied: whether checkpoints are written from a copy.
    """
    what, advice = "tables and their optimizer state", "lower max_table_rows"
    needed = num_elements * 2 * torch.float32.itemsize
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if is_copied:
        what = f"{what}, and a copy of both for checkpoints,"
        advice = f"leave out checkpoint_every, {advice}"
        needed *= 2
    if ranks.rank() == 0:
        print(f"{what} take {needed / 1e9:.1f} of {there / 1e9:.0f} GB", flush=True)
    if needed > there:
        raise MemoryError(
            f"{what} take {needed / 1e9:.0f} GB, and there are {there / 1e9:.0f} GB; {advice} or "
            "embedding_dim"
        )


def build_optimizers(config: DlrmConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adagrad for the tables and for all else, with one learning rate."""
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    lr, eps = config.learning_rate, config.eps
    return [
        torchembed.optim.Adagrad(tables, lr=lr, eps=eps),
        torchembed.optim.DenseAdagrad(dense, lr=lr, eps=eps),
    ]
