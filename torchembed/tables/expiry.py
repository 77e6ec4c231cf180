"""Expiry: rows of dynamic tables go once no training batch has used them for long enough."""

from torch import Tensor

from torchembed.ops.hash_table import Counter, HashTables
from torchembed.tables.deletion_log import DeletionLog
from torchembed.tables.slot_windows import SlotWindows


def erase_expired(
    hash_tables: HashTables,
    windows: SlotWindows,
    epoch: Tensor,
    newest: Tensor,
    is_trained: Tensor | None = None,
    deletions: DeletionLog | None = None,
) -> None:
    """Erase, in the window of ``epoch``, the ids that no batch after ``newest`` has used.

    Torch operations of static shapes: never waits for a GPU, and may be captured.

    Args:
        hash_tables: changed.
        windows: over their slots.
        epoch: int64 ``[1]``: the newest admission epoch.
        newest: int64 ``[1]``: the last epoch whose rows expire; none of them is in use.
        is_trained: bool ``[1]``: False where nothing may change; None: True.
        deletions: notes the ids that go.
    """
    slots, is_due = windows.at(epoch)
    touched = hash_tables.touched[slots]
    is_expired = is_due & (hash_tables.digests[slots] > 0) & (touched <= newest)
    if is_trained is not None:
        is_expired &= is_trained
    if deletions is not None:
        ids = hash_tables.keys[slots]
        deletions.append(is_expired, ids, windows.tables, epoch, Counter.EVICTED_EXPIRED)
    gone = is_expired.long()
    for counter, change in (
        (Counter.EVICTED_EXPIRED, gone),
        (Counter.SIZE, -gone),
        (Counter.EVICTED_AGE, gone * (epoch - touched)),
    ):
        hash_tables.counters[:, counter].index_add_(0, windows.tables, change)
    state = hash_tables.digests, hash_tables.keys, hash_tables.touched, hash_tables.scores
    for tensor in state:
        if tensor is not None:
            tensor.scatter_(0, slots, tensor[slots].masked_fill(is_expired, 0))
