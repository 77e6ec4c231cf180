"""The mean over GPUs by push: each averages a share of all ranks' numbers, and gives it to all."""

from collections.abc import Sequence

import torch

from torchembed.autograd.gradient_slots import FlatSpans
from torchembed.ops.push import Move
from torchembed.sharding.transport.channel import PushDomain, half_bytes

_WIDTH = 64
"""Elements are cut into rows of so many, which ranks share out."""
NUM_LANES = 2


class PushedMean:
    """Means over the ranks of ``domain`` of tensors that every rank has alike.

    Each mean is summed in float32, in the order of ranks, by one rank: it has the same bits on all.

    Args:
        use: of no other means; these come in the same order on every rank.
    """

    def __init__(self, domain: PushDomain, use: str) -> None:
        self._domain, self._use = domain, use
        self._streams: list[torch.cuda.Stream] = []
        """Of each lane."""

    def start(
        self, numbers: Sequence[FlatSpans], dtype: torch.dtype, number: int
    ) -> torch.cuda.Event:
        """Begin :meth:`take` beside what else the current stream is given; it is done at the event
        that is returned. ``numbers`` must be held until then.

        Args:
            number: of the mean in its backward. Means take turns at two lanes, so that one travels
                while ranks wait for each other in the one before.
        """
        if not self._streams:
            device = self._domain.device
            self._streams = [torch.cuda.Stream(device, priority=-3) for _ in range(NUM_LANES)]
        lane = number % NUM_LANES
        stream = self._streams[lane]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.take(numbers, dtype, lane)
            done = torch.cuda.Event()
            done.record()
        return done

    def take(self, numbers: Sequence[FlatSpans], dtype: torch.dtype, lane: int) -> None:
        """Make ``numbers`` their mean, which travels in ``dtype``, in place; all in one exchange of
        the ``lane``.

        Spans begin and end at multiples of 64 elements, but at a buffer's end. Collective; the
        first of a size waits for the GPU and the other ranks.
        """
        domain, before = self._domain, 0
        placed = []
        for flat, spans in numbers:
            padding = -flat.numel() % _WIDTH
            rows = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
            of_rows = [(start // _WIDTH, -(-stop // _WIDTH)) for start, stop in spans]
            placed.append((flat, rows.view(-1, _WIDTH), of_rows, before))
            before += sum(stop - start for start, stop in of_rows)
        num_rows = before
        rows_a_rank = -(-num_rows // domain.num_ranks)
        share = rows_a_rank * _WIDTH
        num_bytes = share * domain.num_ranks * dtype.itemsize
        parts = domain.channel((self._use, "parts", lane), num_bytes)
        means = domain.channel((self._use, "means", lane), num_bytes)
        for _, rows, spans, before in placed:
            moves = shares(spans, before, rows_a_rank, domain.rank, domain.num_ranks)
            parts.push(rows, moves, dtype)
        parts.meet()
        num_mine = min(share, num_rows * _WIDTH - domain.rank * share)
        parts.push_mean(means, dtype, share, num_mine)
        means.meet()
        for flat, rows, spans, before in placed:
            moves = []
            for start, stop in spans:
                moves.append((0, stop - start, _WIDTH, before, 0, start * _WIDTH, _WIDTH))
                before += stop - start
            means.collect(rows, moves, _WIDTH, dtype)
            if rows.numel() > flat.numel():
                flat.copy_(rows.view(-1)[: flat.numel()])


def most_bytes_of_means(num_bytes: int) -> int:
    """Of a rank's memory, for all channels of a :class:`PushedMean` whose largest mean is of
    ``num_bytes``, at most: in each lane of parts and of means two halves each, in sizes that are
    powers of two and so, together, less than twice the largest."""
    return NUM_LANES * 2 * 2 * 2 * half_bytes(num_bytes)


def shares(
    spans: Sequence[tuple[int, int]], before: int, rows_a_rank: int, rank: int, num_ranks: int
) -> list[Move]:
    """The moves of every rank's share of the rows of ``spans``, one after the other, to it, where
    ``before`` rows of others come first. Each rank begins with another one's."""
    moves: list[Move] = []
    for turn in range(num_ranks):
        peer = (rank + 1 + turn) % num_ranks
        place = before
        for start, stop in spans:
            low = max(peer * rows_a_rank - place, 0) + start
            high = min((peer + 1) * rows_a_rank - place + start, stop)
            if low < high:
                target = (rank - peer) * rows_a_rank + place + low - start
                moves.append((peer, high - low, _WIDTH, low, 0, target * _WIDTH, _WIDTH))
            place += stop - start
    return moves
