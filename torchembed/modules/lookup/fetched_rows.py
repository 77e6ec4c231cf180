"""Rows of a batch that are brought to the device, and the error for those that find no place."""

import torch
from torch import Tensor

from torchembed.core.stand_ins import in_transform
from torchembed.modules.lookup.bad_ids import BadIdReport
from torchembed.ops.segments import Runs, find_runs
from torchembed.tables import Admission, DiskGroup, FetchedRows, TieredGroup


def fetch_rows(
    group: TieredGroup,
    rows: Tensor,
    runs: Runs | None,
    admission: Admission | None,
    report: BadIdReport,
) -> FetchedRows | None:
    """Bring ``rows [L]`` of a batch to the device; None where the tables are frozen, and inside
    a transform of ``torch.func``.

    Args:
        runs: of ``rows``, where they are known.
        report: raises where they find no place; of rows that are fetched ahead of their step only
            :func:`fetch_refused` does, once the batch before it needs no place any more.

    Raises:
        RuntimeError: as ``report`` does.
    """
    if in_transform():
        return None  # the lookup says why it cannot be trained here
    if runs is None:
        runs = find_runs(rows, group.num_rows)
    fetched = group.fetch(runs, admission)
    if fetched is not None and (admission is None or admission.epoch is None):
        _submit(group, fetched, fetched.num_refused, report)
    return fetched


def fetch_refused(group: TieredGroup, fetched: FetchedRows, report: BadIdReport) -> None:
    """Bring rows to the device that were refused when they were fetched ahead of their step.

    Raises:
        RuntimeError: as ``report`` does, where they find no place now.
    """
    _submit(group, fetched, group.fetch_refused(fetched), report)


def submit_nothing_refused(device: torch.device, report: BadIdReport) -> None:
    """Submit a check of fetched rows that passes."""
    one = torch.ones(1, dtype=torch.int64, device=device)
    report.submit(one, one, None, lambda *_: "", RuntimeError)


def _submit(
    group: TieredGroup, fetched: FetchedRows, num_refused: Tensor, report: BadIdReport
) -> None:
    names = ", ".join(table.spec.name for table in group.tables)
    num_slots = group.cache.row_of_slot.numel()
    if isinstance(group, DiskGroup):
        assert fetched.num_short is not None
        _submit_places(group, names, fetched.num_short, report)

    def describe(_: int, num_refused: int) -> str:
        return (
            f"tables {names} share a cache of {num_slots} rows on the device, and a batch uses "
            f"{num_refused} more; enlarge cache_rows or cache_bytes of their storage by as many "
            "rows, or train smaller batches"
        )

    report.submit(num_refused, (num_refused == 0).long(), None, describe, RuntimeError)


def _submit_places(group: DiskGroup, names: str, num_short: Tensor, report: BadIdReport) -> None:
    num_places = group.host.row_of_slot.numel()

    def describe(_: int, num_short: int) -> str:
        return (
            f"tables {names} on disk share {num_places} rows of host memory, and a batch needs "
            f"{num_short} more beside the rows in the cache on the device; enlarge host_rows or "
            "host_bytes of their storage by as many rows, train smaller batches, or close one "
            "pipeline before another trains them"
        )

    report.submit(num_short, (num_short == 0).long(), None, describe, RuntimeError)
