"""Tables of TorchRec's kernels that live in host memory, behind a cache on the device."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor

from torchembed.integrations.torchrec.tables.batched_tables import LookupSource
from torchembed.integrations.torchrec.tables.device_view import device_view
from torchembed.integrations.torchrec.tables.fused_tables import FusedTables
from torchembed.modules.lookup.bad_ids import BadIdReport
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.segments import Runs, find_runs
from torchembed.tables import FetchedRows, TableSet, TieredGroup
from torchembed.tables.tiers import host_tensor


class HostTables(FusedTables):
    """Tables that backward updates, in host memory.

    Forward brings the rows of a batch that may be trained into the cache, where they stay until
    backward has updated them; others it reads where they are. What TorchRec sees of rows and states
    is host memory, as of the last :meth:`flush`.

    The tables' specs have a storage, equal for those of one width. A batch that uses more rows than
    the cache of one width holds raises a ``RuntimeError``: on a GPU a later forward does.
    """

    _location_on_gpus = EmbeddingLocation.MANAGED_CACHING

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        TableSet.over(self.groups)  # gives tables their parameters
        self._refusals = BadIdReport()
        self._under_way: set[TieredGroup] = set()
        """Groups with rows that a forward has looked up and backward is still to update."""

    @staticmethod
    def _allocated(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_tensor((num_elements,), dtype, device)

    def _shown(self, stored: Tensor) -> Tensor:
        return device_view(stored, self.groups[0].device) if self.groups else stored

    def _source(self, number: int, rows: Tensor) -> LookupSource:
        group = self._tiered_groups[number]
        if not torch.is_grad_enabled():
            positions = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device)
            places = torch.where(rows < 0, rows, positions)
            return LookupSource(group.gathered_rows(rows), places, None)
        runs = find_runs(rows, group.num_rows)
        fetched = group.fetch(runs)
        assert fetched is not None  # tables of a kernel have a rule, and are trained
        self._check_places(group, fetched)
        self._under_way.add(group)
        sink = functools.partial(self._update_cached, group, self.iteration, runs)
        weight = group.weight.detach().requires_grad_()
        return LookupSource(weight, group.placed_rows(rows), sink)

    def _update_cached(
        self,
        group: TieredGroup,
        iteration: int,
        runs: Runs,
        _: Tensor,
        gradients: RowGradients,
    ) -> None:
        """Update the rows that ``runs`` are of where the cache holds them now."""
        self._update(group, iteration, group.placed_runs(runs), gradients)
        self._under_way.discard(group)

    def _check_places(self, group: TieredGroup, fetched: FetchedRows) -> None:
        """Raise where ``group`` had no place for the rows of a batch."""
        names = ", ".join(table.spec.name for table in group.tables)
        num_slots = group.cache.row_of_slot.numel()

        def describe(_: int, num_refused: int) -> str:
            return (
                f"tables {names} in host memory share a cache of {num_slots} rows on the device, "
                f"and a batch uses {num_refused} more; raise load_factor of their CacheParams or "
                "cache_rows of their storage, or train smaller batches"
            )

        self._submit(fetched.num_refused, describe)

    def _submit(self, num_missing: Tensor, describe: Callable[[int, int], str]) -> None:
        """Raise what ``describe`` makes of their number where places are missing."""
        is_good = (num_missing == 0).long()
        self._refusals.submit(num_missing, is_good, None, describe, RuntimeError)

    @property
    def _tiered_groups(self) -> list[TieredGroup]:
        return [group for group in self.groups if isinstance(group, TieredGroup)]

    def flush(self) -> None:
        """Write trained rows to host memory, as the overridden method. Rows and states may then be
        changed in place, unless backward is still to update rows: what a pipeline has prepared
        ahead is read anew."""
        for group in self._tiered_groups:
            group.write_back()
            if group not in self._under_way:
                group.forget_cached()

    def reset_cache_states(self) -> None:
        """Empty the caches, as the overridden method, once what was trained is written to host
        memory: what is loaded may be some tables alone, or rows without their states."""
        for group in self._tiered_groups:
            group.write_back()
            group.forget_cached()
