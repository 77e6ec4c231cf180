"""Partitions of keys: the hash by which HugeCTR divides them too."""

import pytest
import torch

from torchembed.core.key_partitions import partition_of

_HASHES = {
    0: 0,
    1: 985654925471400243,
    2: 10425527611697618238,
    3: 2866049428576867024,
    -1: 16399884477989705468,
    2**31: 17103418273448957940,
    2**63 - 1: 2387706527826741422,
    -(2**63): 8202776869289805531,
    12345678901: 10245323611731309786,
}
"""Computed by Python's own integers."""


@pytest.mark.parametrize("num_partitions", [1, 2, 7, 8, 1000, 2**31 - 1])
def test_partitions_are_the_hash_modulo_their_number(num_partitions: int) -> None:
    found = partition_of(torch.tensor(list(_HASHES)), num_partitions)
    assert found.dtype == torch.int64
    assert found.tolist() == [value % num_partitions for value in _HASHES.values()]


def test_no_keys_have_no_partitions() -> None:
    assert partition_of(torch.empty(0, dtype=torch.int64), 8).shape == (0,)


def test_keys_that_follow_each_other_are_spread_evenly() -> None:
    counts = partition_of(torch.arange(80_000), 8).bincount(minlength=8)
    # Ten standard deviations of a binomial count of mean 10,000.
    assert counts.sub(10_000).abs().max() < 1_000


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match=r"keys must be int64, got torch.int32; call .long\(\)"):
        partition_of(torch.tensor([1], dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="num_partitions must be at least 1, got 0"):
        partition_of(torch.tensor([1]), 0)
