"""Refusing ranks that were started with different models, plans or settings."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def check_agreement(description: Sequence[str], group: Any) -> None:
    """Raise on every rank where the ranks' descriptions, lists of lines, differ.

    Collective; small: digests are compared, and texts exchanged only where they differ.

    Raises:
        ValueError: naming two ranks and the first line in which they differ.
    """
    digest = hashlib.sha256("\n".join(description).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(other, mine) for other in digests):
        return
    descriptions: list[Any] = [None] * len(digests)
    dist.all_gather_object(descriptions, list(description), group=group)
    first = descriptions[0]
    rank, other = next((r, d) for r, d in enumerate(descriptions) if d != first)
    ours, theirs = next(
        pair
        for pair in itertools.zip_longest(first, other, fillvalue="nothing more")
        if pair[0] != pair[1]
    )
    raise ValueError(
        f"ranks must shard the same model in the same way; rank 0 has {ours!r} where rank {rank} "
        f"has {theirs!r}. Start all ranks with the same code and settings"
    )
