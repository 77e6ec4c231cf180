"""The mean over GPUs by push: each averages one share of the elements, and pushes it to all."""

from collections.abc import Sequence

import torch

from torchembed.autograd.gradient_slots import FlatSpans
from torchembed.core.copies.rectangles import RectangleCopy
from torchembed.sharding.transport.channel import PushDomain, half_bytes

_WIDTH = 64
"""Elements of a row; the rows of a tensor are divided over ranks."""
NUM_LANES = 2
"""Number of streams, with channels of their own, between which successive means alternate."""


class PushedMean:
    """Averages tensors of equal shapes over the ranks of ``domain``, in place.

    One rank sums each element in float32, in the order of ranks, so that all get the same bits.

    Args:
        use: name of these means, which come in the same order on every rank.
    """

    def __init__(self, domain: PushDomain, use: str) -> None:
        self._domain, self._use = domain, use
        self._streams: list[torch.cuda.Stream] = []
        """The stream of each lane."""

    def start(
        self, numbers: Sequence[FlatSpans], dtype: torch.dtype, number: int
    ) -> torch.cuda.Event:
        """Start :meth:`average` on another stream than the current one, and return an event that is
        recorded after it. ``numbers`` must be kept until then.

        Args:
            number: of the mean in its backward. Successive means alternate between two lanes, so
                that one is sent while ranks wait for each other in the barrier of the one before.
        """
        if not self._streams:
            device = self._domain.device
            # Of higher priority than streams that compute: the dense update waits for the means,
            # and their kernels are short.
            self._streams = [torch.cuda.Stream(device, priority=-3) for _ in range(NUM_LANES)]
        lane = number % NUM_LANES
        stream = self._streams[lane]
        # The gradients must be written before they are sent.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.average(numbers, dtype, lane)
            done = torch.cuda.Event()
            done.record()
        return done

    def average(self, numbers: Sequence[FlatSpans], dtype: torch.dtype, lane: int) -> None:
        """Average ``numbers`` over ranks in place, sent in ``dtype``, in one exchange of the
        ``lane``.

        Spans begin and end at multiples of 64 elements, except at a buffer's end. Collective; the
        first of a size waits for the GPU and the other ranks.
        """
        domain, before = self._domain, 0
        placed = []
        for flat, spans in numbers:
            padding = -flat.numel() % _WIDTH
            # Padding copies the buffer, which then is averaged in the copy and written back below.
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
        # A reduce-scatter: every rank pushes each share of its rows to the rank that averages it.
        for _, rows, spans, before in placed:
            moves = shares(spans, before, rows_a_rank, domain.rank, domain.num_ranks)
            parts.push(rows, moves, dtype)
        parts.barrier()
        num_mine = min(share, num_rows * _WIDTH - domain.rank * share)
        parts.push_mean(means, dtype, share, num_mine)
        # An all-gather: every rank has pushed its averaged share to all.
        means.barrier()
        for flat, rows, spans, before in placed:
            moves = []
            for start, stop in spans:
                copy = RectangleCopy(0, stop - start, _WIDTH, before, 0, start * _WIDTH, _WIDTH)
                moves.append(copy)
                before += stop - start
            means.collect(rows, moves, _WIDTH, dtype)
            if rows.numel() > flat.numel():
                flat.copy_(rows.view(-1)[: flat.numel()])


def most_bytes_of_means(num_bytes: int) -> int:
    """The most bytes of a rank for all channels of a :class:`PushedMean`, whose largest mean has
    ``num_bytes``."""
    # Each lane has channels of parts and of means, with two halves each. Their sizes are powers of
    # two, so that all sizes together are less than twice the largest.
    return NUM_LANES * 2 * 2 * 2 * half_bytes(num_bytes)


def shares(
    spans: Sequence[tuple[int, int]], before: int, rows_a_rank: int, rank: int, num_ranks: int
) -> list[RectangleCopy]:
    """Moves of each rank's share of the rows of ``spans`` to that rank, where ``before`` rows of
    other tensors come first. Each rank begins with the one after it."""
    moves: list[RectangleCopy] = []
    for distance in range(1, num_ranks + 1):
        peer = (rank + distance) % num_ranks
        place = before
        for start, stop in spans:
            low = max(peer * rows_a_rank - place, 0) + start
            high = min((peer + 1) * rows_a_rank - place + start, stop)
            if low < high:
                target = (rank - peer) * rows_a_rank + place + low - start
                moves.append(
                    RectangleCopy(peer, high - low, _WIDTH, low, 0, target * _WIDTH, _WIDTH)
                )
            place += stop - start
    return moves
