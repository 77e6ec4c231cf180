"""The optimizers of torchembed's model, and the precision in which it computes, as a setting has
them."""

from typing import NamedTuple

import torch
from torch import nn

from bench.planning.step_costs import OF_TABLES, UNDER_AUTOCAST
from bench.step.setting import StepSetting
from torchembed import optim
from torchembed.tables import table_of

OF_DENSE = {
    "adagrad": optim.DenseAdagrad,
    "rowwise_adagrad": optim.DenseAdagrad,
    "sgd": optim.DenseSGD,
}


class ModelOptimizers(NamedTuple):
    """The optimizers of a model's tables and of all its other parameters."""

    of_tables: torch.optim.Optimizer
    of_dense: torch.optim.Optimizer


def make_optimizers(model: nn.Module, setting: StepSetting) -> ModelOptimizers:
    """Make torchembed's optimizers; one of no parameters where the model has none of the kind."""
    tables = [p for p in model.parameters() if table_of(p) is not None]
    dense = [p for p in model.parameters() if table_of(p) is None]
    numbers = {"lr": setting.lr}
    if setting.optimizer != "sgd":
        numbers["eps"] = setting.eps
    of_tables, of_dense = OF_TABLES[setting.optimizer], OF_DENSE[setting.optimizer]
    none = [{"params": []}]
    return ModelOptimizers(
        of_tables(tables or none, **numbers),
        of_dense(dense or none, **numbers, dtype=half_precision(setting)),
    )


def half_precision(setting: StepSetting) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` around the model; None where it computes in float32."""
    return torch.bfloat16 if setting.precision in UNDER_AUTOCAST else None
