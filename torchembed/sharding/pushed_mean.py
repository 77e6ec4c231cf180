"""The mean over GPUs by push: each averages a share of all ranks' numbers, and gives it to all."""

from collections.abc import Sequence

import torch

from torchembed.core.gradient_slots import FlatSpans
from torchembed.sharding.channel import Move, PushDomain

_WIDTH = 64
"""Elements are cut into rows of so many, which ranks share out."""


class PushedMean:
    """Means over the ranks of ``domain`` of tensors that every rank has alike.

    Each mean is summed in float32, in the order of ranks, by one rank: it has the same bits on all.

    Args:
        use: of no other means; these come in the same order on every rank.
    """

    def __init__(self, domain: PushDomain, use: str) -> None:
        self._domain, self._use = domain, use
        self._stream: torch.cuda.Stream | None = None

    def start(self, numbers: FlatSpans, dtype: torch.dtype) -> torch.cuda.Event:
        """Begin :meth:`take` beside what else the current stream is given; it is done at the event
        that is returned. ``numbers`` must be held until then."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._domain.device, priority=-3)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.take(numbers, dtype)
            done = torch.cuda.Event()
            done.record()
        return done

    def take(self, numbers: FlatSpans, dtype: torch.dtype) -> None:
        """Make ``numbers`` their mean, which travels in ``dtype``, in place.

        Spans begin and end at multiples of 64 elements, but at the buffer's end. Collective; the
        first of a size waits for the GPU and the other ranks.
        """
        domain, flat = self._domain, numbers.flat
        padding = -flat.numel() % _WIDTH
        rows = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        rows = rows.view(-1, _WIDTH)
        spans = [(start // _WIDTH, -(-stop // _WIDTH)) for start, stop in numbers.spans]
        num_rows = sum(stop - start for start, stop in spans)
        rows_a_rank = -(-num_rows // domain.num_ranks)
        share = rows_a_rank * _WIDTH
        num_bytes = share * domain.num_ranks * dtype.itemsize
        parts = domain.channel((self._use, "parts"), num_bytes)
        means = domain.channel((self._use, "means"), num_bytes)
        parts.push(rows, shares(spans, rows_a_rank, domain.rank, domain.num_ranks), dtype)
        parts.meet()
        num_mine = min(share, num_rows * _WIDTH - domain.rank * share)
        parts.push_mean(means, dtype, share, num_mine)
        means.meet()
        moves, before = [], 0
        for start, stop in spans:
            moves.append((0, stop - start, _WIDTH, before, 0, start * _WIDTH, _WIDTH))
            before += stop - start
        means.collect(rows, moves, _WIDTH, dtype)
        if padding:
            flat.copy_(rows.view(-1)[: flat.numel()])


def shares(
    spans: Sequence[tuple[int, int]], rows_a_rank: int, rank: int, num_ranks: int
) -> list[Move]:
    """The moves of every rank's share of the rows of ``spans``, one after the other, to it. Each
    rank begins with another one's."""
    moves: list[Move] = []
    for turn in range(num_ranks):
        peer = (rank + 1 + turn) % num_ranks
        target = rank * rows_a_rank
        first, last = peer * rows_a_rank, (peer + 1) * rows_a_rank
        before = 0
        for start, stop in spans:
            low = max(first - before, 0) + start
            high = min(last - before + start, stop)
            if low < high:
                moves.append((peer, high - low, _WIDTH, low, 0, target * _WIDTH, _WIDTH))
                target += high - low
            before += stop - start
    return moves
