"""What every optimizer asks of its hyperparameters."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_hyperparameters(defaults: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for ``betas`` outside [0, 1) and for negative numbers; a tensor is not
    read, since a GPU would be waited for."""
    for name, value in defaults.items():
        if name == "betas":
            if not all(0.0 <= beta < 1.0 for beta in value):
                raise ValueError(f"betas must be in [0, 1), got {value}")
        elif not isinstance(value, Tensor) and not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")


def rule_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """What the rules of rows and of dense elements both take of a parameter group."""
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    return {
        "eps": group.get("eps", 0.0),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
    }
