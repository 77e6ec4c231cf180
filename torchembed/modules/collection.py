"""The base of the two collections: their configs, tables, slots and names."""

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchembed.core import checks
from torchembed.core.features import Features, SparseFeatures, as_sparse_features
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.trees import Tree
from torchembed.core.types import OnBadId
from torchembed.modules.collection_description import CollectionDescription
from torchembed.modules.configs import (
    ConfigLike,
    EmbeddingConfig,
    as_config,
    check_not_dynamic,
    check_seed,
)
from torchembed.modules.lookup.bad_ids import check_offsets, deferred_id_checks
from torchembed.modules.lookup.feature_selection import capacity_for, select_features
from torchembed.modules.lookup.lookup_stages import B, R, V
from torchembed.modules.lookup.slots import Slots
from torchembed.modules.lookup.stateless_lookup import BadIds, find_bad_ids
from torchembed.modules.staged_collection import StagedCollection
from torchembed.modules.table_module import TableWeight, as_on_bad_id
from torchembed.modules.traced.traced_rows import traced_bad_ids
from torchembed.modules.traced.traced_slots import TracedSlots
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import Table


class FeatureSlots:
    """The assignment of features to tables, and the names of the results.

    A slot is one use of a table by a feature; slots come in the order of the tables, and of each
    table's features.
    """

    def __init__(self, configs: Sequence[EmbeddingConfig]) -> None:
        slots = [(t, name) for t, config in enumerate(configs) for name in config.feature_names]
        uses = Counter(name for _, name in slots)
        self.tables = [table for table, _ in slots]
        """For each slot the index of its table."""
        self.features = [name for _, name in slots]
        self.names = [
            name if uses[name] == 1 else f"{name}@{configs[table].name}" for table, name in slots
        ]
        """For each slot the key of its result: ``feature@table`` where several tables use it."""
        self._indices_of_keys: dict[tuple[str, ...], list[int]] = {}

    def subset(self, slots: Sequence[int]) -> "FeatureSlots":
        """Some of the slots, in their order."""
        made = copy.copy(self)
        made.tables = [self.tables[slot] for slot in slots]
        made.features = [self.features[slot] for slot in slots]
        made.names = [self.names[slot] for slot in slots]
        made._indices_of_keys = {}
        return made

    def batch(self, features: Features, *, has_capacity: bool = False) -> SparseFeatures:
        """``features`` (ours or a ``KeyedJaggedTensor``) with exactly one feature for each slot.

        Args:
            has_capacity: take room for as many ids as the shape of ``features`` allows, on a CPU
                too, in place of asking how many there are.

        Raises:
            ValueError: where a feature is missing; on the CPU also for offsets outside the ids.
        """
        batch = as_sparse_features(features)
        if batch.offsets is not None:
            check_offsets(batch.offsets, batch.values.numel())
        # Dynamo compiles a function again where a dictionary that it reads has changed.
        is_traced = torch.compiler.is_compiling()
        indices = None if is_traced else self._indices_of_keys.get(batch.keys)
        if indices is None:
            missing = sorted(set(self.features) - set(batch.keys))
            if missing:
                raise ValueError(f"features must have the keys {missing}, got {list(batch.keys)}")
            indices = [batch.keys.index(name) for name in self.features]
            if not is_traced:
                self._indices_of_keys[batch.keys] = indices
        return select_features(
            batch, indices, capacity_for(batch, indices) if has_capacity else None
        )


class Collection(StagedCollection[B, R, V]):
    """Several tables, each looked up by one or more features."""

    _config_kind: type[EmbeddingConfig]
    _container: str
    """The attribute that holds the tables' weights."""
    _weight_form: WeightGradient
    _is_weighted = False

    def __init__(
        self,
        tables: Sequence[ConfigLike],
        device: torch.device | str | None,
        on_bad_id: OnBadId | str,
        seed: int,
        output_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if output_dtype is not None and output_dtype not in checks.FLOAT_DTYPES:
            raise TypeError(
                f"output_dtype must be float32, float16 or bfloat16, got {output_dtype}"
            )
        self._output_dtype = torch.float32 if output_dtype is None else output_dtype
        self._casts_vectors = output_dtype is None
        if isinstance(tables, (str, Mapping)) or not isinstance(tables, Iterable):
            raise TypeError(f"tables must be a list of configs, got {type(tables).__name__}")
        if not tables:
            raise ValueError("tables must hold at least one config, got none")
        self._configs = [as_config(config, self._config_kind) for config in tables]
        duplicates = [n for n, c in Counter(c.name for c in self._configs).items() if c > 1]
        if duplicates:
            raise ValueError(f"tables must have different names, got {duplicates} more than once")
        self._on_bad_id = as_on_bad_id(on_bad_id)
        check_seed(seed)
        self._tables = [Table(config.spec(seed)) for config in self._configs]
        self._hold(self._tables, [self._lookup_key(config) for config in self._configs], device)
        self._feature_slots = FeatureSlots(self._configs)
        self._slots = self._made_slots()

    def _made_slots(self) -> Slots:
        return Slots(
            self._table_set,
            [self._tables[table] for table in self._feature_slots.tables],
            self._feature_slots.features,
            self._on_bad_id,
        )

    def _lookup_key(self, config: EmbeddingConfig) -> Hashable:
        """The key that tables must share, besides dim and dtype, to be looked up in one call."""
        return None

    def _table_weights(self) -> nn.ModuleDict:
        return nn.ModuleDict({t.spec.name: TableWeight(t) for t in self._tables})

    @property
    def description(self) -> CollectionDescription:
        """The tables and features that the collection looks up, and how. Its tables are those of
        ``table_set``, in the order of the configs."""
        return CollectionDescription(
            configs=tuple(self._configs),
            container=self._container,
            is_pooled=self.is_pooled,
            is_weighted=self._is_weighted,
            on_bad_id=self._on_bad_id,
            output_dtype=self._output_dtype,
            casts_vectors=self._casts_vectors,
            weight_form=self._weight_form,
            lookup_keys=tuple(map(self._lookup_key, self._configs)),
            reserved_columns=self.reserved_columns,
        )

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self._tables[0].group.device

    def forward(self, features: Tree) -> Tree:
        if not torch.compiler.is_compiling():
            return super().forward(features)
        return self._result(features, self._traced(self._single_part(features)))

    def _single_part(self, features: Tree) -> SparseFeatures:
        """``features``, or the part of them that the collection takes all of its from."""
        lookups = self.divided(features)
        if len(lookups) > 1:
            raise TypeError(
                f"features must have those of one collection in one part where it is compiled or "
                f"serves, got {len(lookups)} parts with some; make one SparseFeatures of them"
            )
        return lookups[0][1]

    def _features_of_slots(self) -> list[str]:
        return self._feature_slots.features

    def _take_slots(self, slots: tuple[int, ...]) -> None:
        self._feature_slots = self._feature_slots.subset(slots)
        bad_ids, self._slots = self._slots.bad_ids, self._made_slots()
        self._slots.bad_ids = bad_ids

    def _traced(self, batch: SparseFeatures) -> V:
        """The vectors of a batch, while a compiler traces the module."""
        raise NotImplementedError

    def _traced_slots(self) -> TracedSlots:
        if torch.compiler.is_dynamo_compiling():
            self._table_set.follow_parameters()
        tables = [self._tables[table] for table in self._feature_slots.tables]
        return TracedSlots(
            tables,
            self._feature_slots.features,
            self._on_bad_id,
            self._weight_form,
            is_trained=self.training,
        )

    def _stateless(self, features: Features | MixedFeatures) -> tuple[V, BadIds]:
        """The vectors and the bad ids of a batch; changes nothing, and threads may call it at once.

        Raises:
            ValueError, TypeError: for a batch that does not fit.
        """
        batch = self._single_part(features)
        with torch.no_grad(), deferred_id_checks():
            rows = self._route(self._exchange_sizes(batch, ahead=False), None)
            vectors = self._look_up(rows, ahead=False)
            num_ids: dict[str, int] = {}
            slots = self._feature_slots
            for feature, table in zip(slots.features, slots.tables, strict=True):
                of_table = self._tables[table].spec.num_ids
                if of_table is not None:
                    num_ids[feature] = min(of_table, num_ids.get(feature, of_table))
            return vectors, find_bad_ids(batch, [num_ids.get(key) for key in batch.keys])

    def to_torch(self) -> nn.ModuleDict:
        """A module of torch for each table, by its name, with a copy of its weight:
        ``torch.nn.EmbeddingBag`` with ``include_last_offset`` where vectors are pooled, and
        ``torch.nn.Embedding`` otherwise. Which features they are for, the configs say.

        Raises:
            TypeError: for dynamic tables, and those on disk.
        """
        modules = nn.ModuleDict()
        for table, config in zip(self._tables, self._configs, strict=True):
            check_not_dynamic(f"table {config.name}", config.dynamic)
            table.check_whole("a module of torch")
            table.group.write_back()
            module = self._torch_module(config, table.held_weight().detach().clone())
            module.weight.requires_grad_(table.parameter.requires_grad)
            modules[config.name] = module
        return modules.train(self.training)

    def _torch_module(
        self, config: EmbeddingConfig, weight: Tensor
    ) -> nn.EmbeddingBag | nn.Embedding:
        raise NotImplementedError

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        self._slots.bad_ids.check(wait=True)
        traced_bad_ids.check(wait=True)

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        raise NotImplementedError
