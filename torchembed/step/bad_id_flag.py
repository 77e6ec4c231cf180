"""The flag that a batch has a bad id: set on the device, reduced over ranks, reported to the host.

No update of a flagged step changes anything, on any rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.modules.lookup.bad_ids import IdCheck, any_bad


class BadIdFlag(NamedTuple):
    """The result of checking a batch's ids, on the device."""

    skip: Tensor
    """float32 ``[1]``: 1 where a rank's batch has a bad id."""
    found: Tensor
    """int64: :attr:`IdCheck.found` of this rank's checks, one after the other."""

    def to_host(self, memory: Tensor | None = None) -> Tensor:
        """int64, ``skip`` and ``found``, in pinned ``memory`` or new memory; there once the
        current stream has come so far."""
        report = torch.cat([self.skip.long(), self.found])
        if memory is None or memory.shape != report.shape:
            # Pinned, since a copy to pageable memory would make the host wait for the GPU.
            memory = torch.empty(report.shape, dtype=report.dtype, pin_memory=report.is_cuda)
        return memory.copy_(report, non_blocking=True)


def reduce_checks(checks: Sequence[IdCheck], group: dist.ProcessGroup | None) -> BadIdFlag | None:
    """The flag of the batch that gave ``checks``; None where no collection raises for bad ids.

    Collective over ``group`` (None for one rank); never waits for a GPU.
    """
    if not checks:
        return None
    # Everything stays on the device: a collective of the flag, and no branch of the host on it,
    # lets all ranks skip the same step without waiting for it.
    found = torch.cat([c.found for c in checks]) if len(checks) > 1 else checks[0].found
    # A float, since torch's fused optimizers take it as the found_inf of a gradient scaler.
    skip = any_bad(checks).float()
    if group is not None:
        dist.all_reduce(skip, dist.ReduceOp.MAX, group=group)
    return BadIdFlag(skip, found)


def either(one: BadIdFlag | None, other: BadIdFlag | None) -> BadIdFlag | None:
    """The flag of a batch whose ids were checked in two portions."""
    if one is None or other is None:
        return other if one is None else one
    return BadIdFlag(one.skip.maximum(other.skip), torch.cat([one.found, other.found]))
