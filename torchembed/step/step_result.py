"""What a train step gives."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchembed.modules.bad_ids import Suspect


class StepResult(NamedTuple):
    """What a step gives, on the device and detached from autograd."""

    loss: Tensor
    """``[]``, this rank's."""
    output: Any
    """The model's, a tree of tensors: logits, where there is a loss function."""
    batch: Any
    """What was trained; jagged sparse features are as they were given, wherever that is."""


class StepOutcome(NamedTuple):
    """A step's result, and what is known of its ids."""

    result: StepResult
    report: Tensor | None
    """What :meth:`~torchembed.step.bad_batches.Verdict.to_host` gave."""
    suspects: list[Suspect]
    held: Any = None
    """What the device may still read."""
    done: torch.cuda.Event | None = None
    """What comes once a GPU has done the step; None: once it has done what the current stream has
    got."""
