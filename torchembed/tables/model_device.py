"""The device that a model computes on."""

import torch
from torch import nn

from torchembed.tables.table import table_of


def model_device(model: nn.Module) -> torch.device:
    """The device of the first parameter of ``model``; of a table whose rows live elsewhere that of
    its cache.

    Raises:
        StopIteration: if it has no parameter.
    """
    parameter = next(model.parameters())
    table = table_of(parameter)
    cache_device = None if table is None else table.cache_device
    return parameter.device if cache_device is None else cache_device
