"""Batches with bad ids: found on the device, skipped by every rank, raised once the host knows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.modules.bad_ids import Suspect


class Verdict(NamedTuple):
    """What the device knows of a batch's ids."""

    skip: Tensor
    """float32 ``[1]``: 1 where a rank's batch has a bad id."""
    found: Tensor
    """int64: what is found of each of this rank's suspects."""

    def to_host(self, memory: Tensor | None = None) -> Tensor:
        """int64, ``skip`` and ``found``, in pinned ``memory``, or new; there
        once the stream has got so far."""
        report = torch.cat([self.skip.long(), self.found])
        if memory is None:
            memory = torch.empty(report.shape, dtype=report.dtype, pin_memory=report.is_cuda)
        return memory.copy_(report, non_blocking=True)


def judge(suspects: Sequence[Suspect], group: Any) -> Verdict | None:
    """What is known of the batch that gave ``suspects``; None where no collection raises.

    Collective over ``group`` (None for one rank); never waits for a GPU.
    """
    if not suspects:
        return None
    found = torch.cat([suspect.found for suspect in suspects])
    bad = [suspect.found[:1] < suspect.num_ids for suspect in suspects]
    skip = torch.cat(bad).any().float().reshape(1)
    if group is not None:
        dist.all_reduce(skip, dist.ReduceOp.MAX, group=group)
    return Verdict(skip, found)


def either(one: Verdict | None, other: Verdict | None) -> Verdict | None:
    """The verdict on a batch whose ids were seen in two portions."""
    if one is None or other is None:
        return other if one is None else one
    return Verdict(one.skip.maximum(other.skip), torch.cat([one.found, other.found]))


def skip_of(verdict: Verdict | None) -> Tensor | None:
    """What updates by the batch are predicated on; None where they are not."""
    return None if verdict is None else verdict.skip


def raise_for(skip: int, found: Sequence[int], suspects: Sequence[Suspect]) -> None:
    """Raise ``IndexError`` for a verdict that came to the host."""
    if not skip:
        return
    first = 0
    for suspect in suspects:
        numbers = found[first : first + len(suspect.found)]
        if numbers[0] < suspect.num_ids:
            raise IndexError(f"{suspect.describe(*numbers)}. That step changed nothing")
        first += len(numbers)
    raise IndexError(
        "id out of range in another rank's batch, whose error says more. That step changed nothing"
    )
