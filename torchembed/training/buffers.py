"""Averages module buffers, such as batch norm's statistics, over ranks."""

import torch
import torch.distributed as dist
from torch import nn

from torchembed.core.ranks import world_size


@torch.no_grad()
def average_buffers(model: nn.Module) -> None:
    """Replace every floating buffer of ``model`` by its mean over the ranks, in place.

    For batch norm, whose running statistics are those of each rank's own samples: call it before
    evaluating and saving. Every rank must call it.
    """
    if world_size() == 1:
        return
    for _, buffer in sorted(model.named_buffers()):
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world_size())
