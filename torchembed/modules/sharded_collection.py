"""The base of the sharded collections: the rows that this rank holds, and routes to the others."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core.features import SparseFeatures
from torchembed.core.types import OnBadId
from torchembed.modules.bad_ids import BadIdReport
from torchembed.modules.collection import Collection
from torchembed.modules.slots import SlotName, Slots, checked_rows
from torchembed.modules.table_module import TableModule, TableWeight
from torchembed.sharding.data_parallel import row_gradient_mean
from torchembed.sharding.global_rows import local_rows, row_wise_tensor
from torchembed.sharding.layout import Layout
from torchembed.sharding.plan import Placement, TablePlan
from torchembed.tables import Table


def _distribute(module: "ShardedCollection", state: dict[str, Any], prefix: str, _: Any) -> None:
    """After ``state_dict``: row-wise tables become ``DTensor``s over the mesh."""
    for config, plan in zip(module._configs, module._plans, strict=True):
        if plan.placement is Placement.ROW_WISE:
            key = f"{prefix}{module._container}.{config.name}.weight"
            empty = torch.empty(0, config.embedding_dim, dtype=config.dtype, device=module.device)
            state[key] = row_wise_tensor(
                state.get(key, empty), mesh=module._mesh, num_rows=config.num_embeddings
            )


def _localize(module: "ShardedCollection", state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``load_state_dict``: each table becomes this rank's rows of it.

    Takes ``DTensor``s as ``state_dict`` gives them, and whole tables as unsharded models have them.
    """
    held = {table.spec.name: table for table in module._local.values()}
    for config in module._configs:
        key, table = f"{prefix}{module._container}.{config.name}.weight", held.get(config.name)
        if table is None:
            state.pop(key, None)
        elif key in state:
            state[key] = local_rows(
                state[key],
                first_row=table.first_row,
                num_rows=table.num_rows,
                whole_rows=table.spec.num_rows,
            )


class ShardedPart(NamedTuple):
    """Slots whose ids travel together: their numbers, the layout, and this rank's lookups."""

    slots: list[int]
    layout: Layout
    local: Slots


class ShardedCollection(TableModule):
    """A collection whose tables are spread over the ranks of a one-dimensional mesh.

    Made by :func:`~torchembed.shard_embeddings` from an unsharded collection. Only the rows that
    this rank holds are ever allocated. Parameters are this rank's shards, plain tensors; in
    ``state_dict`` a row-wise table is a ``DTensor`` over the mesh, a table-wise one appears on its
    owner only.
    """

    _container: str
    """The attribute that holds the tables' weights."""

    def __init__(
        self, source: Collection, plans: Sequence[TablePlan], mesh: DeviceMesh, device: torch.device
    ) -> None:
        super().__init__()
        self._configs = source._configs
        self._feature_slots = source._feature_slots
        self._on_bad_id = source._on_bad_id
        self._plans = list(plans)
        self._mesh, self._group = mesh, mesh.get_group()
        self._rank = mesh.get_local_rank()
        self._num_ranks = mesh.size()
        self.bad_ids = BadIdReport()

        reduction = row_gradient_mean(self._group)
        self._local: dict[int, Table] = {}
        for number, (table, plan) in enumerate(zip(source._tables, plans, strict=True)):
            for shard in plan.shards:
                if shard.rank == self._rank:
                    local = Table(table.spec, first_row=shard.first_row, num_rows=shard.num_rows)
                    local.is_sharded = plan.placement is not Placement.DATA_PARALLEL
                    local.gradient_reduction = None if local.is_sharded else reduction
                    if plan.placement is Placement.ROW_WISE:
                        local.as_global = functools.partial(
                            row_wise_tensor, mesh=mesh, num_rows=table.spec.num_rows
                        )
                    self._local[number] = local
        keys = [source._lookup_key(self._configs[number]) for number in self._local]
        self._hold(self._local.values(), keys, device)
        self.register_state_dict_post_hook(_distribute)
        self.register_load_state_dict_pre_hook(_localize)
        for number, local in self._local.items():
            local.parameter.requires_grad_(source._tables[number].parameter.requires_grad)
        if not source._tables[0].parameter.is_meta:
            self._copy_rows(source)

        tables = self._feature_slots.tables
        is_replicated = [plans[t].placement is Placement.DATA_PARALLEL for t in tables]
        self._replicated_slots = [s for s, replicated in enumerate(is_replicated) if replicated]
        self._sharded_slots = [s for s, replicated in enumerate(is_replicated) if not replicated]
        self._replicated = Slots(
            self._table_set,
            [self._local[tables[s]] for s in self._replicated_slots],
            [self._feature_slots.features[s] for s in self._replicated_slots],
            OnBadId.ZERO,
        )
        specs = [table.spec for table in source._tables]
        self._slot_names = [
            SlotName(specs[t].name, feature, specs[t].num_rows)
            for t, feature in zip(tables, self._feature_slots.features, strict=True)
        ]
        self._num_rows = self._rows_of_slots(device)

    def _part(self, slots: list[int]) -> ShardedPart:
        """The layout of ``slots`` over the ranks and the lookups of this rank's blocks of them."""
        tables = self._feature_slots.tables
        layout = Layout([self._plans[tables[s]] for s in slots], self._num_ranks)
        mine = [slots[block.slot] for block in layout.blocks[self._rank]]
        local = Slots(
            self._table_set,
            [self._local[tables[s]] for s in mine],
            [self._feature_slots.features[s] for s in mine],
            OnBadId.ZERO,  # ids outside a shard's rows are other ranks'; bad ones were found before
        )
        return ShardedPart(slots, layout, local)

    @torch.no_grad()
    def _copy_rows(self, source: Collection) -> None:
        for number, table in self._local.items():
            rows = slice(table.first_row, table.first_row + table.num_rows)
            table.parameter.data.copy_(source._tables[number].parameter.data[rows])

    def _table_weights(self) -> nn.ModuleDict:
        return nn.ModuleDict({t.spec.name: TableWeight(t) for t in self._local.values()})

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        weights = self.get_submodule(self._container)
        return ((t, weights.get_submodule(t.spec.name)) for t in self._local.values())

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are."""
        return self._num_rows.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardedCollection":
        super()._apply(fn, recurse)
        # fn may leave contents undefined, as to_empty's does, so that only its device is asked.
        self._num_rows = self._rows_of_slots(fn(self._num_rows).device)
        return self

    def _rows_of_slots(self, device: torch.device) -> Tensor:
        """Rows of each slot's whole table, int64."""
        rows = [name.num_rows for name in self._slot_names]
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def _checked(self, batch: SparseFeatures) -> SparseFeatures:
        """``batch`` with -1 (or the nearest id) for each id outside its table.

        Raises:
            IndexError: under ``OnBadId.RAISE``, on the rank whose batch holds the bad id.
        """
        rows = checked_rows(
            batch,
            torch.zeros_like(self._num_rows),
            self._num_rows,
            batch.values.dtype,
            self._on_bad_id,
            self._slot_names,
            self.bad_ids,
        )
        return SparseFeatures(
            keys=batch.keys,
            values=rows,
            batch_size=batch.batch_size,
            offsets=batch.offsets,
            hotness=batch.hotness,
            weights=batch.weights,
        )

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        self.bad_ids.check(wait=True)
