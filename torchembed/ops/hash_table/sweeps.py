"""Passes over the slots of one table: erasing by a condition, and export in pieces.

They are torch operations of static shapes, so that a pass never waits for a GPU and may be
captured.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core import checks
from torchembed.core.hash_tables import Counter
from torchembed.ops.hash_table.layout import HashTables, SlotRange

_REASONS = (Counter.ERASED, Counter.EVICTED_EXPIRED, Counter.EVICTED_TARGET)


class ExportedKeys(NamedTuple):
    """Keys of a range, in order of their slots. Entries from ``num_keys`` on are 0, -1 in
    ``slots``."""

    slots: Tensor
    """int64 ``[n]``."""
    keys: Tensor
    """int64 ``[n]``."""
    scores: Tensor
    """int64 ``[n]``; ``touched``, under LRU."""
    touched: Tensor
    """int64 ``[n]``."""
    num_keys: Tensor
    """int64 ``[1]``."""


def export_keys(
    hash_tables: HashTables, slots: SlotRange, is_chosen: Tensor | None = None
) -> ExportedKeys:
    """The keys in a range of slots; all, or those that are chosen. Changes nothing and never
    synchronizes.

    Worked example: of slots 4 to 7, of which 5 holds key 30 and 7 holds key 9, the result is
    ``slots = [5, 7, -1, -1]``, ``keys = [30, 9, 0, 0]`` and ``num_keys = [2]``.

    Args:
        hash_tables: the tables.
        slots: ``n`` slots.
        is_chosen: bool ``[n]``, such as ``slots.of(hash_tables.touched) > mark``.

    Raises:
        TypeError, ValueError: for a mask that does not fit.
    """
    is_held = slots.of(hash_tables.digests) > 0
    if is_chosen is not None:
        _check_chosen(is_chosen, slots)
        is_held = is_held & is_chosen
    # Slots that are left out write to entry n, which is cut off: shapes stay static.
    entry = torch.where(is_held, is_held.cumsum(0) - 1, slots.num_slots)

    def compact(values: Tensor, behind: int) -> Tensor:
        out = values.new_full((slots.num_slots + 1,), behind)
        return out.scatter_(0, entry, values)[: slots.num_slots]

    numbers = torch.arange(slots.num_slots, device=entry.device) + slots.first_slot
    touched = slots.of(hash_tables.touched)
    scores = touched if hash_tables.scores is None else slots.of(hash_tables.scores)
    return ExportedKeys(
        compact(numbers, -1),
        compact(slots.of(hash_tables.keys), 0),
        compact(scores, 0),
        compact(touched, 0),
        is_held.sum(0, keepdim=True),
    )


class ErasedKeys(NamedTuple):
    """The keys of a range of slots that :func:`erase_if` erased."""

    is_erased: Tensor
    """bool ``[n]``, for each slot of the range."""
    keys: Tensor
    """int64 ``[n]``: the key that the slot held; 0 where none was erased."""


def erase_if(
    hash_tables: HashTables,
    slots: SlotRange,
    is_chosen: Tensor,
    *,
    reason: Counter,
    epoch: Tensor,
    released: Tensor,
) -> ErasedKeys:
    """Erase the keys in the chosen slots of a range; rows touched in an epoch after ``released``
    stay. Never synchronizes.

    Args:
        hash_tables: changed.
        slots: ``n`` slots of one table.
        is_chosen: bool ``[n]``, such as ``slots.of(hash_tables.touched) < oldest``. Slots that are
            free may be chosen.
        reason: the counter of the erased keys: ERASED, EVICTED_EXPIRED or EVICTED_TARGET. All but
            the first count ages, too.
        epoch: int64 ``[1]``: the newest admission epoch, from which ages are counted.
        released: int64 ``[1]``: all batches up to this epoch were trained.

    Raises:
        TypeError, ValueError: for a mask or a reason that does not fit.
    """
    _check_chosen(is_chosen, slots)
    if reason not in _REASONS:
        names = ", ".join(counter.name for counter in _REASONS)
        raise ValueError(f"reason must be one of {names}, got {reason!r}")
    touched, keys = slots.of(hash_tables.touched), slots.of(hash_tables.keys)
    is_erased = (slots.of(hash_tables.digests) > 0) & is_chosen & (touched <= released)
    count_erased(
        hash_tables.counters,
        torch.full((1,), slots.table, device=is_erased.device),
        is_erased.sum(0, keepdim=True),
        ((epoch - touched) * is_erased).sum(0, keepdim=True),
        reason,
    )
    erased = ErasedKeys(is_erased, keys * is_erased)
    for state in hash_tables.of_slots():
        slots.of(state).masked_fill_(is_erased, 0)
    return erased


def count_erased(
    counters: Tensor, tables: Tensor, num_erased: Tensor, ages: Tensor, reason: Counter
) -> None:
    """Count keys that are erased. Never synchronizes.

    Args:
        counters: of the tables; changed.
        tables: int64 ``[n]``, in which a table may come several times.
        num_erased: int64 ``[n]``: keys of each of ``tables``.
        ages: int64 ``[n]``: batches since their last use, all together; counted but for ERASED.
        reason: the counter of the keys.
    """
    changes = [(reason, num_erased), (Counter.SIZE, -num_erased)]
    if reason is not Counter.ERASED:
        changes.append((Counter.EVICTED_AGE, ages))
    for counter, change in changes:
        counters[:, counter].index_add_(0, tables, change)


def coldest(
    hash_tables: HashTables, slots: SlotRange, num_kept: Tensor, *, released: Tensor
) -> Tensor:
    """The slots, bool ``[n]``, whose keys must go so that ``num_kept`` are left: those of the least
    scores, the longest unused of equal ones, and of these the first. Never synchronizes.

    Rows touched in an epoch after ``released`` are not among them, so that more may be left.

    Args:
        hash_tables: the tables.
        slots: ``n`` slots: all of a table, for a target of the whole table.
        num_kept: int64 ``[1]``.
        released: int64 ``[1]``: all batches up to this epoch were trained.
    """
    is_held = slots.of(hash_tables.digests) > 0
    touched = slots.of(hash_tables.touched)
    may_go = is_held & (touched <= released)
    by_use = torch.sort(touched, stable=True).indices
    scores = touched if hash_tables.scores is None else slots.of(hash_tables.scores)
    by_score = by_use[torch.sort(scores[by_use], stable=True).indices]
    order = by_score[torch.sort((~may_go[by_score]).to(torch.uint8), stable=True).indices]
    num_going = (is_held.sum() - num_kept).clamp_min(0).minimum(may_go.sum())
    is_first = torch.arange(slots.num_slots, device=order.device) < num_going
    return torch.empty_like(may_go).scatter_(0, order, is_first)


def _check_chosen(is_chosen: Tensor, slots: SlotRange) -> None:
    checks.check_dtype("is_chosen", is_chosen, (torch.bool,), "call .bool()")
    checks.check_shape("is_chosen", is_chosen, (slots.num_slots,), "one for each slot")
