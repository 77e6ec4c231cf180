"""Memory and hyper-parameters that the tables of several of TorchRec's kernels may share."""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from torchembed.ops.rowwise_update import UpdateRule


@dataclasses.dataclass
class HyperParameters:
    """The current rule and learning rate of row updates."""

    rule: UpdateRule
    learning_rate: float
    learning_rate_tensor: Tensor = dataclasses.field(compare=False)
    """float32 ``[1]``, on the device of the rows."""

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, on the device too; nothing is copied where it is the same."""
        if lr != self.learning_rate:
            self.learning_rate = lr
            self.learning_rate_tensor.fill_(lr)


class TableMemory(NamedTuple):
    """Rows and optimizer states of tables of one width."""

    weight: Tensor
    """``[R, D]``"""
    states: tuple[Tensor, ...]
    """Optimizer states, one row for each row of ``weight``."""
