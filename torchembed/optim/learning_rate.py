"""Learning rates, in a form that a captured step may read."""

import torch
from torch import Tensor

from torchembed.optim.hyperparameters import ParamGroup


def learning_rate(group: ParamGroup, device: torch.device) -> float | Tensor:
    """``group["lr"]``, as a number where it is a tensor on the CPU and the parameters are not.

    Reading such a tensor here waits for no GPU. A step on a GPU, most of all a captured one, would
    read it when it runs, by which time the host may have set the next step's.
    """
    lr = group["lr"]
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" != device.type else lr
