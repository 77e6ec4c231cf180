"""``EmbeddingBag`` and ``Embedding`` over several ranks."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchembed.core.features import SparseFeatures
from torchembed.core.types import Pooling
from torchembed.modules.call_features import bags_as_feature, ids_as_feature, looked_up_ids
from torchembed.modules.calls_ahead import CallArguments, ModuleOfOneTable
from torchembed.modules.counted_tensor import CountedTensor, elements_of
from torchembed.modules.embedding import EmbeddingBag
from torchembed.modules.index_in_state_dict import IndexInStateDict
from torchembed.modules.inside_ddp import DenseOwner
from torchembed.modules.lookup.forward_admission import admits_in_forward
from torchembed.modules.sharded.bound_to_ranks import BoundToRanks
from torchembed.modules.sharded.joined_exchange import ExchangeKind, ExchangeSlot
from torchembed.modules.sharded.local_table import local_table
from torchembed.modules.sharded.lookup_of_modules import (
    LookupOfModules,
    LookupSettings,
    ModuleTable,
)
from torchembed.modules.sharded.taken_rows import check_untrained, take_rows
from torchembed.modules.single_table import SingleTable
from torchembed.ops.eager_lookup import bags_of_positions, max_of_bags
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.planning.plan import TablePlan
from torchembed.sharding.transport.data_parallel import max_over
from torchembed.sharding.transport.global_rows import local_contents, local_part
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import (
    CountedCaches,
    CountedTables,
    GrowingTables,
    Table,
    TableSet,
    TableSpec,
    check_own_rows,
)


def _distribute(
    module: "ShardedSingleTable", state: dict[str, Any], prefix: str, _: object
) -> None:
    """After ``state_dict``: a divided table becomes a ``DTensor`` over the ranks that hold it."""
    key, table = f"{prefix}weight", module.local_table
    if table is None:
        return
    if key in state:
        state[key] = table.as_global(state[key])
    for name in table.index_contents():
        key = f"{prefix}index.{name}"
        state[key] = table.contents_as_global(state[key])


class ShardedSingleTable(BoundToRanks, IndexInStateDict, ModuleOfOneTable):
    """A module of one table that is spread over the ranks of a mesh.

    Made by :func:`~torchembed.shard_embeddings` from an unsharded module, whose results it gives
    for this rank's ids. Every rank calls it equally often. ``weight`` is this rank's shard, a plain
    tensor, and None on ranks that hold none; in ``state_dict`` a table whose rows or columns are
    divided is a ``DTensor``. Gradients of rows are the mean over ranks.

    A call by itself exchanges ids and vectors with all ranks, and asks them for the sizes. Steps of
    a :class:`~torchembed.training.TrainPipeline` do one exchange for all modules.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        source: SingleTable,
        name: str,
        spec: TableSpec,
        plan: TablePlan,
        ranks: TableRanks,
        device: torch.device,
        pooling: Pooling = Pooling.SUM,
        skipped_id: int | None = None,
        untrained_id: int | None = None,
    ) -> None:
        """
        Args:
            source: has the settings, and the rows unless they are on the meta device.
            name: of the module in its model.
            spec: of the whole table, the same on all ranks.
            pooling: of what is exchanged.
            skipped_id: id that is not looked up; None for none.
            untrained_id: id whose row is looked up and not trained; None for none.
        """
        super().__init__()
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.padding_idx, self.sparse = source.padding_idx, source.sparse
        self.dynamic = source.dynamic
        self._on_bad_id, self._ranks = source.on_bad_id, ranks
        self._weight_form = WeightGradient.SPARSE if source.sparse else WeightGradient.DENSE
        self._dense_owner = DenseOwner()
        self.local_table: Table | None = None
        """This rank's part of the table; None where it has none."""
        self.register_parameter("weight", None)
        table = local_table(spec, plan, ranks)
        tables = [] if table is None else [table]
        self._table_set = TableSet(tables, [None] * len(tables), device)
        if table is not None:
            table.holder, table.may_join, self.local_table = self, True, table
            self.weight = table.parameter
            self._take_rows(source, table)
        self._of_module = ModuleTable(
            name=name,
            spec=spec,
            plan=plan,
            local=table,
            pooling=pooling,
            padding=skipped_id,
            untrained=untrained_id,
            dynamic=source.dynamic,
        )
        self._like = torch.empty(0, dtype=spec.dtype, device=device)
        """Has the dtype of the vectors and the device of the rows, which other ranks may hold."""
        self._alone: dict[bool, LookupOfModules] = {}
        """By whether ids have weights, what looks a call up by itself; made when there is one. In a
        dictionary, since it is no submodule."""
        self.register_state_dict_post_hook(_distribute)
        self.take_mode_and_hooks(source)

    @staticmethod
    def of(
        source: SingleTable,
        name: str,
        spec: TableSpec,
        plan: TablePlan,
        ranks: TableRanks,
        device: torch.device,
    ) -> "ShardedSingleTable":
        """A module that looks up what ``source`` does, with copies of its rows; arguments as for
        the constructor."""
        if isinstance(source, EmbeddingBag):
            return ShardedEmbeddingBag(source, name, spec, plan, ranks, device)
        # The padding of a dynamic table is an id without a row.
        padding, is_dynamic = source.padding_idx, source.dynamic is not None
        return ShardedEmbedding(
            source,
            name,
            spec,
            plan,
            ranks,
            device,
            skipped_id=padding if is_dynamic else None,
            untrained_id=None if is_dynamic else padding,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """The table, whole or as ``state_dict`` gives it, becomes this rank's part of it first."""
        weight, index, table = f"{prefix}weight", f"{prefix}index.", self.local_table
        for key in [key for key in state_dict if key == weight or key.startswith(index)]:
            if table is None:
                del state_dict[key]
            else:
                local = local_part if key == weight else local_contents
                state_dict[key] = local(state_dict[key], table)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _take_rows(self, source: SingleTable, table: Table) -> None:
        """This rank's rows of ``source``; on the meta device it has none, and they are new. Those
        of a dynamic table get their values with their ids."""
        check_untrained(source.table_set.tables[0])
        with torch.no_grad():
            if not source.weight.is_meta and source.dynamic is None:
                take_rows(table, local_part(source.weight.detach(), table))
        table.parameter.requires_grad_(source.weight.requires_grad)
        self._table_set.form_groups()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and name == "weight":
            check_own_rows(self.local_table, param)
        super().register_parameter(name, param)
        if param is not None and name == "weight" and self.local_table is not None:
            self.local_table.parameter = param

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return () if self.local_table is None else ((self.local_table, self),)

    def held_weight(self) -> Tensor:
        """``weight``: the parameter, or what was put in its place."""
        assert self.weight is not None
        return self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._like = fn(self._like)
        self._alone.clear()
        return self

    @property
    def is_on_several_ranks(self) -> bool:
        return True

    @property
    def admission_changes_tables(self) -> bool:
        # The same on ranks that hold no part of the table: steps are chosen by it.
        return self.dynamic is not None or self.fetches_rows

    @property
    def fetches_rows(self) -> bool:
        return self._of_module.plan.storage is not None

    @property
    def _indexed_table(self) -> Table | None:
        return self.local_table

    def _dynamic_names(self) -> list[str]:
        return [] if self.dynamic is None else [self._of_module.spec.name]

    def counted_tables(self) -> CountedTables:
        self._table_set.current_groups()
        tables = dict.fromkeys(self._dynamic_names(), self.local_table)
        return CountedTables(tables, self._like.device, self._ranks.group)

    def counted_caches(self, name: str) -> CountedCaches[str]:
        caches = {name: self.tiered_groups()} if self.fetches_rows else {}
        return CountedCaches(caches, self._like.device, self._ranks.group)

    def growing_tables(self) -> GrowingTables | None:
        if self._growth.is_over or not self._of_module.spec.index.grows:
            self._growth.is_over = True
            return None
        self._table_set.current_groups()
        return GrowingTables(
            [self._table_set.tables], self._like.device, max_over(self._ranks.group)
        )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        placement = self._of_module.plan.placement.value
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}{placement}"

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        for lookup in self._alone.values():
            lookup.check_ids()

    def _settings(self, *, is_weighted: bool) -> LookupSettings:
        return LookupSettings(
            self._ranks,
            self._on_bad_id,
            self._weight_form,
            self._like.dtype,
            self._like.device,
            is_weighted,
        )

    def _exchange_kind(
        self, num_bags: int, *, is_jagged: bool, is_weighted: bool
    ) -> ExchangeKind | None:
        """The kind of joined exchange of a call with ``num_bags`` bags; None where it cannot be
        one, and for evaluation, which changes no table."""
        if not self._can_join:
            return None
        return ExchangeKind(self._settings(is_weighted=is_weighted), (num_bags,), is_jagged)

    @property
    def _can_join(self) -> bool:
        table = self.local_table
        admits = self.training or not self.admission_changes_tables
        return admits and (table is None or table.holds_parameter())

    def _slot(self, ids: Tensor, hotness: int | None) -> ExchangeSlot:
        return ExchangeSlot(self._of_module, ids.numel(), hotness)

    def current_kind(self, kind: ExchangeKind) -> ExchangeKind:
        return kind

    def is_current(self, kind: ExchangeKind) -> bool:
        return self._can_join and kind.settings == self._settings(
            is_weighted=kind.settings.is_weighted
        )

    def _vectors(self, arguments: CallArguments, features: SparseFeatures) -> Tensor:
        """The pooled vectors of ``features``, in the dtype of the weight."""
        if torch.is_grad_enabled():
            self._dense_owner.note_forward(self, self._ranks.gradient_mean)
        answer = self._answered(arguments)
        if answer is not None:
            return answer
        is_weighted = features.weights is not None
        alone = self._alone.get(is_weighted)
        if alone is None:
            settings = self._settings(is_weighted=is_weighted)
            alone = self._alone[is_weighted] = LookupOfModules([self._of_module], settings)
        admits = self.admission_changes_tables and admits_in_forward(self)
        if admits:
            self._grow_in_forward()
        return alone.vectors(_renamed(features), admits=admits).to(self._like.dtype)

    def _are_counted(self, ids: Tensor) -> Tensor:
        """bool ``[L]``: False for ``ids [L]`` that are not looked up, or are padding."""
        if self.dynamic is not None:
            is_counted = torch.ones_like(ids, dtype=torch.bool)
        else:
            ids = looked_up_ids(ids, self.num_embeddings, self._on_bad_id)
            is_counted = ids >= 0
        return is_counted if self.padding_idx is None else is_counted & (ids != self.padding_idx)


class ShardedEmbeddingBag(ShardedSingleTable):
    """:class:`~torchembed.EmbeddingBag` over several ranks."""

    def __init__(
        self,
        source: EmbeddingBag,
        name: str,
        spec: TableSpec,
        plan: TablePlan,
        ranks: TableRanks,
        device: torch.device,
    ) -> None:
        """Arguments are those of :class:`ShardedSingleTable`."""
        pooling = Pooling.MEAN if source.mode == "mean" else Pooling.SUM
        super().__init__(source, name, spec, plan, ranks, device, pooling, source.padding_idx)
        self.mode, self.include_last_offset = source.mode, source.include_last_offset

    def joined_slot(self, arguments: CallArguments) -> tuple[ExchangeKind, ExchangeSlot] | None:
        ids, offsets, weights, _ = arguments
        if (offsets is None) is not (ids.dim() == 2) or self.include_last_offset:
            return None
        num_bags, hotness = len(ids if offsets is None else offsets), None
        if self.mode == "max":
            num_bags, hotness = ids.numel(), 1
        elif offsets is None:
            hotness = ids.shape[1]
        kind = self._exchange_kind(
            num_bags, is_jagged=hotness is None, is_weighted=weights is not None
        )
        return None if kind is None else (kind, self._slot(ids, hotness))

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool ``input``, as :class:`~torchembed.EmbeddingBag` does. Collective.

        Returns:
            ``[B, D]``, dtype of ``weight``.
        """
        arguments = CallArguments(input, offsets, per_sample_weights)
        if isinstance(input, CountedTensor) and self.mode != "max":
            weights = elements_of(per_sample_weights)
            arguments = CallArguments(input.elements, offsets, weights, input.count)
        features = bags_as_feature(arguments, self.mode, self.include_last_offset)
        if self.mode != "max":
            return self._vectors(arguments, features)
        ids, batch_size = features.values, features.batch_size
        vectors, is_counted = self._vectors(arguments, ids_as_feature(ids)), self._are_counted(ids)
        bags = bags_of_positions(
            ids.numel(), features.offsets, features.hotness, batch_size, ids.device
        )
        return max_of_bags(vectors, is_counted, bags, batch_size)


class ShardedEmbedding(ShardedSingleTable):
    """:class:`~torchembed.Embedding` over several ranks."""

    def joined_slot(self, arguments: CallArguments) -> tuple[ExchangeKind, ExchangeSlot] | None:
        ids = arguments.input
        kind = self._exchange_kind(ids.numel(), is_jagged=False, is_weighted=False)
        return None if kind is None else (kind, self._slot(ids, 1))

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ``input [...]``, as ``[..., D]``, dtype of ``weight``. Collective."""
        features = ids_as_feature(input)
        vectors = self._vectors(CallArguments(input), features)
        if self.padding_idx is not None and self.dynamic is None:
            # The padding row's own values may be others than zeros, but get no gradient, also
            # where no fused optimizer leaves it out.
            ids = looked_up_ids(features.values, self.num_embeddings, self._on_bad_id)
            is_padding = ids == self.padding_idx
            vectors = torch.where(is_padding.unsqueeze(1), vectors.detach(), vectors)
        return vectors.view(*input.shape, self.embedding_dim)


def _renamed(features: SparseFeatures) -> SparseFeatures:
    """``features`` under the key of the only use of a lookup."""
    return SparseFeatures(
        keys=("0",),
        values=features.values,
        batch_size=features.batch_size,
        offsets=features.offsets,
        hotness=features.hotness,
        weights=features.weights,
    )
