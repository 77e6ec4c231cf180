"""The device that a model computes on, which is not always that of its first parameter."""

import torch
from torch import nn

from torchembed import EmbeddingBag, HostMemory
from torchembed.tables import model_device, table_of


def test_rows_in_host_memory_are_used_on_the_device_of_their_cache() -> None:
    bag = EmbeddingBag(10, 4, storage=HostMemory(cache_rows=5))
    model = nn.Sequential(bag, nn.Linear(4, 1))
    assert model_device(model) == torch.device("cpu")
    assert model_device(nn.Linear(1, 1, device="meta")) == torch.device("meta")
    table = table_of(bag.weight)
    assert table is not None
    # As on a machine with a GPU, where the weight is on the CPU.
    table.cache_device = torch.device("meta")
    assert model_device(model) == torch.device("meta")
