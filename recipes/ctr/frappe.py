"""Frappe: which mobile app does a user open, in which context?

The protocol is that of BARS' Frappe_x1 (https://openbenchmark.github.io/BARS): the published
split, ten fields, batch norm in all MLPs, gradients clipped at 10, and for each model the L2
penalty, dropout and structure that were found best there. The penalty is FuxiCTR's: half of it
times the sum of squares of all rows of all tables is added to each batch's loss.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.ctr.config import CtrConfig
from recipes.ctr.models import (
    AutoIntConfig,
    DCNConfig,
    DCNv2Config,
    DeepFMConfig,
    DLRMConfig,
    DNNConfig,
    FactorizationMachineConfig,
    LogisticRegressionConfig,
    MLPConfig,
    WideAndDeepConfig,
    XDeepFMConfig,
)
from recipes.ctr.number_file import read_numbers
from recipes.ctr.rows import OneIdEach, Rows
from recipes.ctr.run import run_seeds
from recipes.ctr.served import served_clicks
from recipes.ctr.splits import Splits
from recipes.data_folder import find_data
from recipes.result import Result, Stopped
from recipes.served_run import ServedRun
from torchembed.data.data_path import DataPath
from torchembed.models import DLRMInteraction

FIELDS = (
    "user",
    "item",
    "daytime",
    "weekday",
    "isweekend",
    "homework",
    "cost",
    "weather",
    "country",
    "city",
)


FILES: Mapping[str, Sequence[str]] = {
    "Frappe_x1/train.csv": ("valid.csv", "test.csv"),
    "frappe_x1r/frappe_x1r.npz": (),
}
COLUMNS = ("label", *FIELDS)
PARTS = ("train", "valid", "test")


DESCRIPTION = """
The data are Frappe_x1 as BARS publishes it: train.csv, valid.csv and test.csv, in --data or in a
folder Frappe_x1 there. Each has a header, label,user,item,daytime,weekday,isweekend,homework,cost,
weather,country,city, and rows of integers. Read as well: frappe_x1r.npz with arrays
{train,valid,test}_x, the ids, and {train,valid,test}_y, the labels.
"""


def _config(
    kind: type[CtrConfig], *, embedding_l2: float, **structure: Any
) -> Callable[[str | Path | None], CtrConfig]:
    """From the data's folder to the config of a model."""
    if issubclass(kind, MLPConfig):
        structure |= {"layer_sizes": (400, 400, 400), "batch_norm": True}

    def config(data: str | Path | None = None) -> CtrConfig:
        return kind(
            data=data,
            embedding_dim=10,
            embedding_std=1e-4,
            embedding_l2=embedding_l2,
            learning_rate=0.001,
            max_grad_norm=10.0,
            min_improvement=1e-6,
            **structure,
        )

    config.__doc__ = f"{kind.title} on Frappe_x1, mean of three seeds.\n{DESCRIPTION}"
    return config


CONFIGS = {
    "lr": _config(LogisticRegressionConfig, embedding_l2=1e-5),
    "fm": _config(FactorizationMachineConfig, embedding_l2=5e-6),
    "dnn": _config(DNNConfig, embedding_l2=0.05, dropout=0.2),
    "wide-and-deep": _config(WideAndDeepConfig, embedding_l2=0.1, dropout=0.6),
    "deepfm": _config(DeepFMConfig, embedding_l2=0.05, dropout=0.2),
    "dcn": _config(DCNConfig, embedding_l2=0.05, dropout=0.2, num_cross_layers=3),
    "dcnv2": _config(DCNv2Config, embedding_l2=0.05, dropout=0.4, num_cross_layers=4),
    "dlrm": _config(
        DLRMConfig,
        embedding_l2=0.1,
        dropout=0.4,
        interaction=DLRMInteraction.CONCATENATION,
    ),
    "xdeepfm": _config(XDeepFMConfig, embedding_l2=0.1, dropout=0.2, cin_layer_sizes=(64,)),
    "autoint": _config(
        AutoIntConfig,
        embedding_l2=0.1,
        dropout=0.1,
        num_attention_layers=5,
        attention_dim=128,
        num_heads=4,
    ),
}
"""The config of each model."""


def run(config: CtrConfig, device: torch.device, output: Path) -> Result | Stopped:
    """Train on Frappe_x1 as published."""
    splits = read(find_data(FILES, config.data))
    return run_seeds(config, lambda seed: splits, device, output)


def served(config: CtrConfig, output: Path) -> ServedRun:
    """The best seed's model, asked of test rows."""
    splits = read(find_data(FILES, config.data))
    return served_clicks(config, lambda seed: splits, output)


def read(path: DataPath) -> Splits:
    """The rows of ``path``: ``train.csv``, with the other two beside it, or an ``.npz`` file.

    The files' ids are numbered through all fields, and are the raw ids; here each field's begin at
    0.

    Raises:
        FileNotFoundError: where one of the three files is missing.
        ValueError: for a malformed line, or a label that is not 0 or 1; names file and line.
    """
    parts = _read_npz(path) if path.suffix == ".npz" else _read_csv(path.parent)
    rows = np.concatenate(parts)
    features = {}
    for column, field in enumerate(FIELDS, 1):
        known, ids = np.unique(rows[:, column], return_inverse=True)
        raw_ids = torch.from_numpy(known)
        features[field] = OneIdEach(raw_ids=raw_ids, ids=torch.from_numpy(ids))
    labels = torch.from_numpy(rows[:, 0]).float()
    numbers = torch.arange(len(rows)).split([len(part) for part in parts])
    return Splits(Rows(features=features, labels=labels), *numbers)


def _read_csv(folder: DataPath) -> list[NDArray[np.int64]]:
    """Label and ids of each row, ``[rows, 11]``, of each part."""
    parts = []
    for part in PARTS:
        path = folder / f"{part}.csv"
        rows = read_numbers(path, COLUMNS, separator=",", has_header=True)
        bad = (rows[:, 0] != 0) & (rows[:, 0] != 1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"{path}, line {row + 2}: label must be 0 or 1, got {rows[row, 0]}")
        parts.append(rows)
    return parts


def _read_npz(path: DataPath) -> list[NDArray[np.int64]]:
    with path.open("rb") as file, np.load(file) as arrays:
        return [
            np.column_stack([arrays[f"{part}_y"], arrays[f"{part}_x"]]).astype(np.int64)
            for part in PARTS
        ]
