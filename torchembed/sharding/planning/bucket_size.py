"""The size of the buckets in which gradients of dense parameters are averaged over ranks."""

import math

from torchembed.sharding.planning.load_seconds import ALL_REDUCE_EXCHANGES, LoadSeconds
from torchembed.sharding.planning.topology import Topology
from torchembed.sharding.wire import BUCKET_BYTES


def bytes_of_a_meeting(topology: Topology) -> float:
    """The bytes that links average, over the ranks of several nodes, in the time that these ranks
    take to meet for one mean; 0 within one node, where buckets have one size."""
    if topology.num_nodes == 1:
        return 0.0
    met = ALL_REDUCE_EXCHANGES * topology.collective_seconds
    return met / LoadSeconds(topology=topology).all_reduce_seconds(1.0)


def bucket_bytes(
    gradient_bytes: int, sent_bytes: int, meeting_bytes: float, least_bytes: int = BUCKET_BYTES
) -> int:
    """The size from which on a bucket takes no further gradient.

    Ranks meet for each of ``k`` buckets, which takes as long as ``k * m`` bytes on the links. The
    ``G / k`` bytes of the last bucket are sent when backward is over and hides nothing any more;
    those of the others can be sent during backward. Of the sum, ``k * m + G / k``, the least is at
    ``k = sqrt(G / m)``, here rounded to an integer: buckets are ``sqrt(G * m)`` or so.

    Args:
        gradient_bytes: of all gradients, in their own dtypes, in which buckets are counted.
        sent_bytes: of all gradients on the links, ``G``.
        meeting_bytes: ``m``, the :func:`bytes_of_a_meeting` of the ranks; 0 gives ``least_bytes``.
        least_bytes: the least result.
    """
    if not meeting_bytes:
        return least_bytes
    num_buckets = max(round(math.sqrt(sent_bytes / meeting_bytes)), 1)
    return max(-(-gradient_bytes // num_buckets), least_bytes)
