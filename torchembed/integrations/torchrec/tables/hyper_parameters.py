"""Hyper-parameters of the row updates of a kernel's tables, which may change between steps."""

import dataclasses

from torch import Tensor

from torchembed.ops.rowwise_update import UpdateRule


@dataclasses.dataclass(kw_only=True, eq=False)
class HyperParameters:
    """The current rule and learning rate of row updates."""

    rule: UpdateRule
    learning_rate: float
    learning_rate_tensor: Tensor
    """float32 ``[1]``, on the device of the rows."""

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, on the device too; nothing is copied where it is the same."""
        if lr != self.learning_rate:
            self.learning_rate = lr
            self.learning_rate_tensor.fill_(lr)
