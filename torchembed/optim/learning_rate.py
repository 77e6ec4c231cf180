"""The learning rate that a captured step may read."""

from typing import Any

import torch
from torch import Tensor


def learning_rate(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """``group["lr"]``; as a number where it is a tensor on the CPU for parameters elsewhere.

    Reading that one makes no GPU wait, whereas a step on a GPU, most of all a captured one, would
    read it too late: when it runs, and the host may have set the next step's.
    """
    lr = group["lr"]
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" != device.type else lr
