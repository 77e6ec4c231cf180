"""Sizes of the buckets of dense gradients, by hand."""

import dataclasses
import functools
from fractions import Fraction

import pytest
import torch

from tests.support.planning import make_topology
from tests.support.tolerance import relative_error
from torchembed.sharding import H100, Topology
from torchembed.sharding.planning.bucket_size import bucket_bytes, bytes_of_a_meeting
from torchembed.sharding.wire import BUCKET_BYTES

near = functools.partial(pytest.approx, rel=relative_error(32, torch.float64), abs=0)


def with_overheads(num_nodes: int, ranks_per_node: int) -> Topology:
    topology = make_topology(num_nodes, ranks_per_node)
    return dataclasses.replace(topology, exchange_seconds=2e-6, peer_seconds=1e-6)


def test_bytes_that_links_average_while_ranks_meet() -> None:
    # 1.5 exchanges of 2 + 4 and 2 + 2 us. A byte takes 2 * 3/4 / 1e8 s within a node and, of each
    # rank's quarter, 2 * 1/4 * 1/2 / 1e7 s between nodes: 40 ns.
    assert bytes_of_a_meeting(with_overheads(2, 4)) == near(15e-6 / 40e-9)
    # With one rank on each node all eight meet at once: 1.5 * 10 us; 2 * 7/8 / 1e7 s a byte.
    assert bytes_of_a_meeting(with_overheads(8, 1)) == near(15e-6 / 175e-9)
    assert bytes_of_a_meeting(make_topology(2, 4)) == 0.0  # where meetings take no time


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_one_node_has_buckets_of_one_size(ranks_per_node: int) -> None:
    meeting_bytes = bytes_of_a_meeting(with_overheads(1, ranks_per_node))
    assert meeting_bytes == 0.0
    assert bucket_bytes(1 << 30, 1 << 30, meeting_bytes) == BUCKET_BYTES == 1 << 22


@pytest.mark.parametrize(
    ("gradient_bytes", "sent_bytes", "meeting_bytes", "expected"),
    [
        (1600, 1600, 100.0, 400),  # 4 buckets
        (1601, 1601, 100.0, 401),
        (3200, 1600, 100.0, 800),  # float32 gradients, sent in 16 bits
        (1600, 3200, 100.0, 267),  # 5.7 buckets, so 6
        (1600, 1600, 1600.0, 1600),
        (1600, 1600, 1e9, 1600),
        (1600, 1600, 0.0, 50),
        (1600, 1600, 1.0, 50),  # the least
        (0, 0, 100.0, 50),
    ],
)
def test_sizes(gradient_bytes: int, sent_bytes: int, meeting_bytes: float, expected: int) -> None:
    assert bucket_bytes(gradient_bytes, sent_bytes, meeting_bytes, 50) == expected


@pytest.mark.parametrize("ratio", [1, 2, 3, 6, 7, 12, 13, 100, 110, 111])
def test_no_other_number_of_buckets_takes_less(ratio: int) -> None:
    """Meetings, and the bytes of the last bucket, where all gradients take ``ratio`` meetings."""
    sent_bytes = ratio * 5040

    def taken(num_buckets: int) -> Fraction:
        return num_buckets * 5040 + Fraction(sent_bytes, num_buckets)

    full = bucket_bytes(sent_bytes, sent_bytes, 5040.0, 1)
    assert taken(-(-sent_bytes // full)) == min(map(taken, range(1, ratio + 1)))


def test_128_h100_average_16_million_numbers_in_two_buckets() -> None:
    topology = Topology.of_hardware(H100, ranks_per_node=8, num_nodes=16)
    assert topology.collective_seconds * 1.5 == near(141.6e-6)
    assert round(bytes_of_a_meeting(topology) / 1e6, 1) == 12.6
    assert bucket_bytes(32_000_000, 32_000_000, bytes_of_a_meeting(topology)) == 16_000_000
