"""Deltas of tables that ranks share: each rank's own, which fail together, and those of all."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from torchembed.core.ranks.collective_errors import described
from torchembed.tables.dynamic.deletion_log import SnapshotDueError
from torchembed.tables.dynamic.table_delta import Delta, DeltaMark, TableDelta

D = TypeVar("D", Delta, DeltaMark)


def delta_on_all_ranks(read: Callable[[], D], group: dist.ProcessGroup) -> D:
    """This rank's ``read()`` of a delta or a mark, so that no rank has a mark that the others have
    not; collective.

    Raises:
        SnapshotDueError: on all ranks where it is raised on one, which it names.
        Exception: that of ``read``, where it failed here.
        RuntimeError: if it failed on another rank, which it names.
    """
    delta, error = None, None
    try:
        delta = read()
    except Exception as caught:  # noqa: BLE001 - raised below, once all ranks know of it
        error = caught
    failure = None if error is None else (isinstance(error, SnapshotDueError), described(error))
    failures = [failure] * group.size()
    dist.all_gather_object(failures, failure, group=group)
    if error is not None:
        try:
            raise error
        finally:
            del error  # which holds this frame, and so what read refers to
    for rank, of_rank in enumerate(failures):
        if of_rank is not None:
            is_due, message = of_rank
            text = f"no delta of the tables that ranks share: rank {rank} raised {message}"
            raise SnapshotDueError(text) if is_due else RuntimeError(text)
    assert delta is not None
    return delta


def gather_delta(
    delta: Delta, group: dist.ProcessGroup | None = None
) -> Mapping[str, TableDelta] | None:
    """Gather the changes of whole tables from the deltas of the ranks that share them.

    Ids, and rows that ids share, are in the order of the ranks; the shared rows of a rank are for
    the ids that a hash gives to it. Collective: all ranks call it with deltas of the same moment,
    and each continues from its own ``mark``.

    Args:
        delta: what ``delta(since=...)`` of a module gave this rank.
        group: the ranks that share the tables; None for all.

    Returns:
        The changes by the names of tables on the first of the ranks, None on the others.
    """
    if not dist.is_initialized():
        return delta.tables
    own = dict(delta.tables)
    parts = [own] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(own, parts, group=group, group_dst=0)
    if parts is None:
        return None
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _joined([part[name] for part in parts if name in part]) for name in names}


def _joined(parts: list[TableDelta]) -> TableDelta:
    """The changes of a table from those of its parts, whose ids differ."""
    return TableDelta(
        ids=torch.cat([part.ids for part in parts]),
        rows=torch.cat([part.rows for part in parts]),
        deleted_ids=torch.cat([part.deleted_ids for part in parts]),
        deleted_epochs=torch.cat([part.deleted_epochs for part in parts]),
        deletion_reasons=torch.cat([part.deletion_reasons for part in parts]),
        shared_rows=torch.cat([part.shared_rows for part in parts]),
    )
