"""Refusing ranks that were started with different models, plans, settings or code."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist


def check_agreement(
    texts: Mapping[str, Sequence[str]], group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank unless ``texts`` are the same on all of them.

    Collective and small: digests are compared, and texts exchanged only where these differ.

    Args:
        texts: lists of lines, by what they describe.
        group: the ranks; the default process group where None.

    Raises:
        ValueError: names the text that differs, two ranks where it does, and in each the first line
            that the other lacks.
    """
    digest = hashlib.sha256(json.dumps({**texts}, default=list).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(other, mine) for other in digests):
        return
    by_rank: list[dict[str, list[str]]] = [{}] * len(digests)
    dist.all_gather_object(by_rank, {name: list(lines) for name, lines in texts.items()}, group)
    for rank, theirs in enumerate(by_rank):
        for name in dict.fromkeys([*by_rank[0], *theirs]):
            first, other = by_rank[0].get(name, []), theirs.get(name, [])
            if first != other:
                raise ValueError(
                    f"ranks must agree on {name}: rank 0 has {_first_missing(first, other)}, rank "
                    f"{rank} has {_first_missing(other, first)}; start every rank with the same "
                    "code and arguments"
                )


def _first_missing(lines: list[str], other: list[str]) -> str:
    default = "no such line" if set(lines) != set(other) else "the same lines in another order"
    return next((line for line in lines if line not in other), default)
