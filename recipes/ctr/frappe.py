"""Frappe: which mobile app does a user open, in which context?

The protocol is that of BARS' Frappe_x1 (https://openbenchmark.github.io/BARS): the published
split, ten fields, and DCNv2 with batch norm in its MLP. Its L2 penalty of 0.05 is FuxiCTR's: half
of it times the sum of squares of all rows of all tables is added to each batch's loss.
"""

from pathlib import Path

import numpy as np
import torch

from recipes.ctr.config import CtrConfig
from recipes.ctr.rows import OneIdEach, Rows
from recipes.ctr.run import run_seeds
from recipes.ctr.splits import Splits
from recipes.data_folder import find_data
from recipes.result import Result, Stopped

FIELDS = (
    "user",
    "item",
    "daytime",
    "weekday",
    "is_weekend",
    "homework",
    "cost",
    "weather",
    "country",
    "city",
)


def config(data: Path | None = None) -> CtrConfig:
    """DCNv2 on Frappe_x1, mean of three seeds."""
    return CtrConfig(
        data=data,
        embedding_dim=10,
        embedding_std=1e-4,
        embedding_l2=0.05,
        num_cross_layers=4,
        layer_sizes=(400, 400, 400),
        dropout=0.4,
        batch_norm=True,
        learning_rate=0.001,
        min_improvement=1e-6,
    )


def run(config: CtrConfig, device: torch.device, output: Path) -> Result | Stopped:
    """Train on Frappe_x1 as published."""
    splits = read(find_data("frappe_x1r/frappe_x1r.npz", config.data))
    return run_seeds(config, lambda seed: splits, device, output)


def read(path: Path) -> Splits:
    """The rows of ``path``: arrays ``{train,valid,test}_{x,y}`` and ``field_sizes``.

    Ids are numbered through all fields; here each field's begin at 0.
    """
    with np.load(path) as arrays:
        sizes = arrays["field_sizes"].tolist()
        parts = [(arrays[f"{part}_x"], arrays[f"{part}_y"]) for part in ("train", "valid", "test")]
    first_ids = np.cumsum([0, *sizes[:-1]])
    ids = torch.from_numpy(np.concatenate([x for x, _ in parts]) - first_ids)
    labels = torch.from_numpy(np.concatenate([y for _, y in parts])).float()
    features = {
        field: OneIdEach(num_ids=size, ids=ids[:, column].contiguous())
        for column, (field, size) in enumerate(zip(FIELDS, sizes, strict=True))
    }
    numbers = torch.arange(len(labels)).split([len(y) for _, y in parts])
    return Splits(Rows(features=features, labels=labels), *numbers)
