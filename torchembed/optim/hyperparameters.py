"""Hyperparameters that the optimizers of tables and of dense parameters share; a learning rate in
a form that a captured step may read."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

ParamGroup: TypeAlias = dict[str, Any]
"""Parameter group of an optimizer, as torch has it: ``params``, and its hyperparameters by name."""


def check_hyperparameters(defaults: ParamGroup) -> None:
    """Raise ``ValueError`` for ``betas`` outside [0, 1) and for negative numbers; a tensor is not
    read, since that would wait for a GPU."""
    for name, value in defaults.items():
        if name == "betas":
            if not all(0.0 <= beta < 1.0 for beta in value):
                raise ValueError(f"betas must be in [0, 1), got {value}")
        elif not isinstance(value, Tensor) and not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")


def rule_numbers(group: ParamGroup) -> dict[str, float]:
    """Hyperparameters of ``group`` that the rules of rows and of dense elements both have."""
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    return {
        "eps": group.get("eps", 0.0),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
    }


def learning_rate(group: ParamGroup, device: torch.device) -> float | Tensor:
    """``group["lr"]``, as a number where it is a tensor on the CPU and the parameters are not.

    Reading such a tensor here waits for no GPU. A step on a GPU, most of all a captured one, would
    read it when it runs, by which time the host may have set the next step's.
    """
    lr = group["lr"]
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" != device.type else lr
