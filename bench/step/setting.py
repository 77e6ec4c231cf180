"""The setting of a measured training step, equal for every system."""

import dataclasses
from typing import NamedTuple

import torch
from torch.optim.optimizer import ParamsT


class Precisions(NamedTuple):
    """What a step rounds to: fields of :class:`StepSetting`."""

    dense: str
    """Its ``precision``; ``fp64`` of losses that are taken for exact."""
    wire: str
    rows: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSetting:
    """One row of the benchmark, less the system."""

    batch_size: int
    """Samples of each rank."""
    ids: str
    optimizer: str
    precision: str
    """Precision of the dense part: ``bf16``, ``tf32`` or ``fp32``; or ``fp8``, which is bf16 but
    for the products of wide linear layers."""
    wire: str
    """Precision of vectors and gradients between ranks: ``bf16``, ``fp32``, or TorchRec's
    ``fp16``."""
    max_rows: int | None
    device: torch.device
    rows: str = "fp32"
    """Precision of rows, ``fp32`` or ``bf16``; their state is fp32."""
    transport: str = "collective"
    """Exchange of torchembed's vectors and gradients: ``collective`` or ``push``."""
    lr: float = 0.0005
    """Not MLPerf's 0.004, under which Adagrad's first step throws the loss to 12, where rounding
    decides; the time of a step does not depend on it."""
    eps: float = 1e-8
    seed: int = 0

    @property
    def precisions(self) -> Precisions:
        return Precisions(self.precision, self.wire, self.rows)

    def with_precisions(self, precisions: Precisions) -> "StepSetting":
        """The same setting in other precisions."""
        dense, wire, rows = precisions
        return dataclasses.replace(self, precision=dense, wire=wire, rows=rows)

    def dense_optimizer(self, parameters: ParamsT) -> torch.optim.Optimizer:
        """The optimizer of the tables, for the dense part; torch's own."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        return torch.optim.Adagrad(parameters, lr=self.lr, eps=self.eps)
