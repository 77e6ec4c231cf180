"""The device that a model computes on."""

import torch
from torch import nn

from torchembed.tables.table import table_of


def model_device(model: nn.Module) -> torch.device:
    """The device of the first parameter of ``model``; of a table whose rows live elsewhere that of
    its cache. Without parameters that of the first buffer, and without any of these the CPU."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        buffer = next(model.buffers(), None)
        return torch.device("cpu") if buffer is None else buffer.device
    table = table_of(parameter)
    cache_device = None if table is None else table.cache_device
    return parameter.device if cache_device is None else cache_device
