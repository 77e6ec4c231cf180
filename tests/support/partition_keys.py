"""Keys of one partition, for tests that count its rows."""

import torch
from torch import Tensor

from torchembed.core.key_partitions import partition_of


def keys_of(partition: int, num_keys: int, num_partitions: int) -> Tensor:
    """The first ``num_keys`` keys from 0 on that ``partition`` holds, int64 ``[num_keys]``."""
    keys = torch.arange(2 * num_keys * num_partitions + 1000)
    found = keys[partition_of(keys, num_partitions) == partition][:num_keys]
    assert len(found) == num_keys
    return found


def lines_of(keys: Tensor, line_bytes: int) -> Tensor:
    """A line for each key that tells it, uint8 ``[n, line_bytes]``."""
    num_times = -(-line_bytes // 8)
    return (keys * 1_000_003 + 17)[:, None].tile(1, num_times).view(torch.uint8)[:, :line_bytes]
