"""Samples of a history, the item that followed, and items that were drawn."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.sequences.interactions import Interactions
from torchembed.models import Impressions


class Samples:
    """Each item of each user that has one before it, but those left out, with what was before.

    Args:
        data: all users' items.
        max_length: most items of a history, the newest.
        num_left_out: last items of a user that are no samples.
    """

    def __init__(self, data: Interactions, *, max_length: int, num_left_out: int) -> None:
        self.data, self.max_length = data, max_length
        first, last = data.offsets[:-1], data.offsets[1:] - num_left_out
        counts = (last - first - 1).clamp_min(0)
        starts = (first + 1).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts).repeat_interleave(counts)
        self.places = starts + torch.arange(len(starts)) - before
        """int64 ``[N]``: where each sample's item is among the data's."""
        self.lengths = (self.places - first.repeat_interleave(counts)).clamp_max(max_length)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def chosen(self) -> Tensor:
        """int64 ``[N]``: the item of each sample."""
        return self.data.items[self.places]

    def batch(self, numbers: Tensor, generator: torch.Generator | None) -> Impressions:
        """The samples ``numbers [B]``, packed into as many places as full histories have.

        With a generator the item that followed comes with another one that is drawn uniformly, and
        labels.
        """
        lengths, places = self.lengths[numbers], self.places[numbers]
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        num_items = int(offsets[-1])
        shifts = (places - lengths - offsets[:-1]).repeat_interleave(lengths)
        items = self.data.items[torch.arange(num_items) + shifts]
        items = F.pad(items, (0, len(numbers) * self.max_length - num_items))
        chosen = self.data.items[places]
        if generator is None:
            return Impressions(items, offsets, chosen.unsqueeze(1))
        drawn = torch.randint(self.data.num_items - 1, chosen.shape, generator=generator)
        drawn += drawn >= chosen
        labels = torch.tensor([1.0, 0.0]).repeat(len(chosen), 1)
        return Impressions(items, offsets, torch.stack([chosen, drawn], dim=1), labels)


class SampleBatches:
    """One rank's batches of some samples, in order; what does not fill a batch is left out.

    Args:
        samples: all of them.
        numbers: which, int64 ``[n]``.
        batch_size: over all ranks, of which each takes an equal part.
        rank: this rank.
        num_ranks: how many there are.
        negatives_seed: of the items that are drawn; None for none.
    """

    def __init__(
        self,
        samples: Samples,
        numbers: Tensor,
        *,
        batch_size: int,
        rank: int,
        num_ranks: int,
        negatives_seed: int | None,
    ) -> None:
        self._samples, self._numbers = samples, numbers
        self._batch_size, self._rank, self._num_ranks = batch_size, rank, num_ranks
        self._seed = negatives_seed

    def __len__(self) -> int:
        return math.floor(len(self._numbers) / self._batch_size)

    def __iter__(self) -> Iterator[Impressions]:
        generator = None
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed * self._num_ranks + self._rank)
        is_pinned = torch.cuda.is_available()
        for numbers in self._numbers.split(self._batch_size)[: len(self)]:
            batch = self._samples.batch(numbers.chunk(self._num_ranks)[self._rank], generator)
            yield batch.mapped(Tensor.pin_memory) if is_pinned else batch
