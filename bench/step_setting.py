"""What a training step is measured with: one setting, for every system alike."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSetting:
    """One row of the benchmark, less the system."""

    batch_size: int
    """Samples of each rank."""
    ids: str
    optimizer: str
    precision: str
    """Of the dense part: ``bf16``, ``tf32`` or ``fp32``. Rows and their state are fp32."""
    wire: str
    """``bf16`` or ``fp32``: pooled vectors and their gradients between ranks."""
    max_rows: int | None
    device: torch.device
    lr: float = 0.004
    eps: float = 1e-8
    seed: int = 0

    def dense_optimizer(self, parameters: Sequence[Any]) -> torch.optim.Optimizer:
        """The optimizer of the tables, for the dense part; torch's own."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        return torch.optim.Adagrad(parameters, lr=self.lr, eps=self.eps)


def dense_parameters(model: nn.Module) -> list[Tensor]:
    """The dense parameters of torchembed's DLRM-DCNv2: bottom MLP, then all ``v``, ``u`` and biases
    of the cross layers, then the top MLP."""
    parameters = dict(model.named_parameters())
    parts = ("dense_arch.", "cross.v.", "cross.u.", "cross.bias.", "over_arch.")
    return [p for part in parts for name, p in parameters.items() if name.startswith(part)]
