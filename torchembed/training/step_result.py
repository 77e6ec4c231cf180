"""What a train step gives."""

from typing import Any, NamedTuple

from torch import Tensor


class StepResult(NamedTuple):
    """What a step gives, on the device and detached from autograd."""

    loss: Tensor
    """``[]``, this rank's."""
    output: Any
    """The model's, a tree of tensors: logits, where there is a loss function."""
    batch: Any
    """What was trained."""
