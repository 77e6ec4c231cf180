"""Shares of ids against Python integers."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.support.sizes import Sizes
from tests.support.tracing import compiled_once
from torchembed.core.random_bits import GOLDEN, MIX_FIRST, MIX_SECOND
from torchembed.ops.id_shares import are_in_share, shares_of_ids
from torchembed.ops.id_shares.checks import MOST_SHARES

LOW, HIGH = -(2**63), 2**63 - 1
IDS = st.one_of(st.integers(-3, 3), st.integers(LOW, HIGH), st.sampled_from([LOW, HIGH]))
SHARES = st.one_of(st.integers(1, 9), st.sampled_from([1024, MOST_SHARES - 1]))


def share_of(number: int, num_shares: int) -> int:
    """The share of an id, without tensors."""
    value = (1 + (number + 1) * GOLDEN) % 2**64
    value = (value ^ (value >> 30)) * MIX_FIRST % 2**64
    value = (value ^ (value >> 27)) * MIX_SECOND % 2**64
    return ((value ^ (value >> 31)) >> 32) * num_shares >> 32


def test_shares(sizes: Sizes, device: torch.device) -> None:
    @settings(max_examples=sizes.num_examples)
    @given(ids=st.lists(IDS, max_size=9), num_shares=SHARES)
    def check(ids: Sequence[int], num_shares: int) -> None:
        found = shares_of_ids(torch.tensor(ids, dtype=torch.int64, device=device), num_shares)
        assert found.tolist() == [share_of(number, num_shares) for number in ids]
        assert found.dtype == torch.int64

    check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("hotness", [(2, 0, 1, 3), (600, 0, 1, 1030), (0, 0, 0, 0)])
def test_ids_in_the_share_of_their_feature(
    hotness: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(len(hotness))
    batch_size, num_shares, asked = 3, (1, 4, 3, 2), (0, 1, 2, 1)
    num_ids = batch_size * sum(hotness)
    ids = torch.randint(-(2**31), 2**31, (num_ids,), generator=generator, dtype=torch.int64)
    features = [f for f, count in enumerate(hotness) for _ in range(count * batch_size)]
    found = are_in_share(
        ids.to(device, dtype),
        torch.tensor(num_shares, device=device),
        torch.tensor(asked, device=device),
        hotness=hotness,
        batch_size=batch_size,
    )
    expected = [
        share_of(number, num_shares[f]) == asked[f]
        for number, f in zip(ids.tolist(), features, strict=True)
    ]
    assert found.tolist() == expected and found.dtype == torch.bool


def test_shares_of_few_ids_that_are_not_contiguous(device: torch.device) -> None:
    ids = torch.arange(-4, 4, device=device)
    assert shares_of_ids(ids[::2], 3).equal(shares_of_ids(ids, 3)[::2])
    assert shares_of_ids(ids.int(), 3).equal(shares_of_ids(ids, 3))
    assert shares_of_ids(ids[:0], 3).shape == (0,)


@pytest.mark.parametrize("num_shares", [0, -1, 2**31])
def test_refuses_numbers_of_shares(num_shares: int, device: torch.device) -> None:
    message = rf"^num_shares must be positive and less than 2\*\*31, got {num_shares}$"
    with pytest.raises(ValueError, match=message):
        shares_of_ids(torch.zeros(1, dtype=torch.int64, device=device), num_shares)


def test_opcheck(device: torch.device) -> None:
    ids, one = torch.arange(6, device=device), torch.ones(2, dtype=torch.int64, device=device)
    torch.library.opcheck(torch.ops.torchembed.shares_of_ids.default, (ids, 5))
    torch.library.opcheck(torch.ops.torchembed.are_in_share.default, (ids, [1, 2], one + 1, one, 2))


def test_compiles_once(device: torch.device) -> None:
    compiled = compiled_once(lambda ids: shares_of_ids(ids, 3) + 1)
    for count in (2, 5, 9):
        ids = torch.arange(count, device=device)
        assert compiled(ids).equal(shares_of_ids(ids, 3) + 1)


@pytest.mark.gpu
def test_captured(device: torch.device) -> None:
    ids, num_shares = torch.arange(3000, device=device), torch.tensor([1, 4], device=device)
    shares = torch.tensor([0, 2], device=device)

    def call() -> torch.Tensor:
        return are_in_share(ids, num_shares, shares, hotness=(1, 2), batch_size=1000)

    call()  # brings what is known of features to the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    ids.add_(7)
    graph.replay()
    assert found.equal(call())
