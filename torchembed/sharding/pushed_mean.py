"""The mean over GPUs by push: each averages a share of all ranks' numbers, and gives it to all."""

import torch
from torch import Tensor

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
        self._stream = torch.cuda.Stream(domain.device, priority=-1)

    def start(self, numbers: Tensor, dtype: torch.dtype) -> torch.cuda.Event:
        """Begin :meth:`take` beside what else the current stream is given; it is done at the event
        that is returned. ``numbers`` must be held until then."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.take(numbers, dtype)
            done = torch.cuda.Event()
            done.record()
        return done

    def take(self, numbers: Tensor, dtype: torch.dtype) -> None:
        """Make the contiguous ``numbers`` their mean, which travels in ``dtype``, in place.

        Collective; the first of a size waits for the GPU and the other ranks.
        """
        domain, flat = self._domain, numbers.view(-1)
        padding = -flat.numel() % _WIDTH
        rows = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        rows = rows.view(-1, _WIDTH)
        rows_a_rank = -(-rows.shape[0] // domain.num_ranks)
        share = rows_a_rank * _WIDTH
        num_bytes = share * domain.num_ranks * dtype.itemsize
        parts = domain.channel((self._use, "parts"), num_bytes)
        means = domain.channel((self._use, "means"), num_bytes)
        parts.push(rows, self._shares(rows.shape[0], rows_a_rank), dtype)
        parts.meet()
        num_mine = min(share, rows.numel() - domain.rank * share)
        parts.push_mean(means, dtype, share, num_mine)
        means.meet()
        whole = (0, rows.shape[0], _WIDTH, 0, 0, 0, _WIDTH)
        means.collect(rows, [whole], _WIDTH, dtype)
        if padding:
            flat.copy_(rows.view(-1)[: flat.numel()])

    def _shares(self, num_rows: int, rows_a_rank: int) -> list[Move]:
        """Of each rank's share of the rows to it."""
        domain, moves = self._domain, []
        for turn in range(domain.num_ranks):
            peer = (domain.rank + 1 + turn) % domain.num_ranks
            first = peer * rows_a_rank
            size = max(min(rows_a_rank, num_rows - first), 0)
            moves.append((peer, size, _WIDTH, first, 0, domain.rank * rows_a_rank * _WIDTH, _WIDTH))
        return moves
