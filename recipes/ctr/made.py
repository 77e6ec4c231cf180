"""The made click log, which needs no data: any model learns it in minutes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.ctr.config import CtrConfig
from recipes.ctr.models import MODELS
from recipes.ctr.rows import BagEach, OneIdEach, Rows
from recipes.ctr.run import run_seeds
from recipes.ctr.served import served_clicks
from recipes.ctr.splits import Splits
from recipes.ranks import check_batch_size
from recipes.result import Result, Stopped
from recipes.served_run import ServedRun
from torchembed.data import ClickLog, ClickLogConfig, Split

LOG = ClickLogConfig(num_train=1 << 18, num_held_out=1 << 16)
PARTS = (Split.TRAIN, Split.VALIDATION, Split.TEST)


def _config(kind: type[CtrConfig]) -> Callable[[str | Path | None], CtrConfig]:
    """From no data to the config of a model."""

    def config(data: str | Path | None = None) -> CtrConfig:
        if data is not None:
            raise ValueError(
                f"--data must be left out for the made click log, got {data}; a recipe whose name "
                "ends with .frappe or .ml1m reads data"
            )
        return kind(seeds=(1,), embedding_dim=16, learning_rate=0.002)

    config.__doc__ = (
        f"{kind.title} on a made click log.\n\n"
        "The log has 13 dense features and 10 sparse ones, and is made anew, always the same."
    )
    return config


CONFIGS = {name: _config(kind) for name, kind in MODELS.items()}
"""The config of each model."""


def check(config: CtrConfig, num_ranks: int) -> None:
    """Raise ``ValueError`` where the ranks cannot divide a batch evenly."""
    check_batch_size(config.batch_size, num_ranks)


def run(config: CtrConfig, device: torch.device, output: Path) -> Result | Stopped:
    """Train on the made log; the result says how good a model can be."""
    logs = _logs()
    splits = read(list(logs.values()))
    result = run_seeds(config, lambda seed: splits, device, output)
    if isinstance(result, Stopped):
        return result
    test = logs[Split.TEST]
    return dataclasses.replace(
        result, bayes_auc=test.bayes_auc(), bayes_logloss=test.bayes_logloss()
    )


def served(config: CtrConfig, output: Path) -> ServedRun:
    """The best seed's model, asked of test rows."""
    splits = read(list(_logs().values()))
    return served_clicks(config, lambda seed: splits, output)


def _logs() -> dict[Split, ClickLog]:
    """The rows that train, validate and test."""
    return {split: ClickLog(LOG, batch_size=1 << 14, split=split) for split in PARTS}


def read(logs: list[ClickLog]) -> Splits:
    """All rows of ``logs``, which train, validate and test."""
    parts = [log.rows(0, log.num_rows) for log in logs]
    features: dict[str, OneIdEach | BagEach] = {}
    for feature, (key, size) in enumerate(zip(logs[0].keys, logs[0].table_sizes, strict=True)):
        ids = torch.from_numpy(np.concatenate([part.ids[feature] for part in parts]))
        features[key] = _feature(ids, torch.arange(size))
    rows = Rows(
        features=features,
        labels=torch.from_numpy(np.concatenate([part.labels for part in parts])),
        dense=torch.from_numpy(np.concatenate([part.dense for part in parts])),
    )
    numbers = torch.arange(len(rows.labels)).split([log.num_rows for log in logs])
    return Splits(rows, *numbers)


def _feature(ids: Tensor, raw_ids: Tensor) -> OneIdEach | BagEach:
    """The feature of ``ids [N, hotness]``."""
    num_rows, hotness = ids.shape
    if hotness == 1:
        return OneIdEach(raw_ids=raw_ids, ids=ids[:, 0])
    return BagEach(
        raw_ids=raw_ids,
        values=ids.flatten(),
        offsets=torch.arange(num_rows + 1) * hotness,
        which=torch.arange(num_rows),
    )
