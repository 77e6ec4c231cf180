"""What tables of several of TorchRec's kernels may have in common: memory, and how it changes."""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from torchembed.ops.rowwise_update import UpdateRule


@dataclasses.dataclass
class HyperParameters:
    """How rows change now; what several tables may share."""

    rule: UpdateRule
    learning_rate: float
    learning_rate_tensor: Tensor = dataclasses.field(compare=False)
    """float32 ``[1]``, on the device of the rows."""

    def set_learning_rate(self, lr: float) -> None:
        if lr != self.learning_rate:
            self.learning_rate = lr
            self.learning_rate_tensor.fill_(lr)


class Rows(NamedTuple):
    """Memory of tables of one width."""

    weight: Tensor
    """``[R, D]``"""
    states: tuple[Tensor, ...]
    """Of their optimizer, flat like ``weight``."""
