"""The lookup of a batch that was admitted ahead of its step."""

from collections.abc import Sequence

import torch.distributed as dist

from torchembed.modules.lookup.bad_ids import deferred_id_checks
from torchembed.step.bad_id_flag import either, reduce_checks
from torchembed.step.lookup_calls import Call, looked_up_in_turns
from torchembed.step.stages import AdmittedBatch, LookedUpBatch


def looked_up_batch(
    calls: Sequence[Call], admitted: AdmittedBatch, group: dist.ProcessGroup | None
) -> LookedUpBatch:
    """Look up what was ``admitted`` for each of ``calls``.

    Its flag is set, too, where rows find no place on the device. Collective over ``group`` (None
    for one rank) where tables live elsewhere; never waits for a GPU.
    """
    with deferred_id_checks() as checks:
        ordered, lookups = looked_up_in_turns(calls, admitted.lookups)
    flag = either(admitted.flag, reduce_checks(checks, group))
    all_checks = [*admitted.checks, *checks]
    return LookedUpBatch(admitted.data, ordered, lookups, flag, all_checks, admitted.epoch)
