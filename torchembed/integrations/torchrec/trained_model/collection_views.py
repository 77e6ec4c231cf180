"""torchembed collections over the tables of TorchRec's, for torchembed's pipeline to train.

Weights, optimizer states and learning rates are shared, not copied.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig as TorchrecBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchembed.core.features import SparseFeatures
from torchembed.core.trees import Tree
from torchembed.core.types import OnBadId
from torchembed.integrations.torchrec.sharded.collections import (
    ShardedEmbeddingBagCollection as TorchrecBags,
)
from torchembed.integrations.torchrec.sharded.collections import (
    ShardedEmbeddingCollection as TorchrecSequences,
)
from torchembed.integrations.torchrec.tables.batched_tables import BatchedTables
from torchembed.integrations.torchrec.tables.fused_tables import FusedTables
from torchembed.modules.collection import FeatureSlots
from torchembed.modules.collection_description import CollectionDescription
from torchembed.modules.configs import EmbeddingBagConfig, EmbeddingConfig, as_config
from torchembed.modules.embedding_collection import SequenceVectors
from torchembed.modules.sharded.sharded_collection import HeldTables, ShardedCollection
from torchembed.modules.sharded.sharded_embedding_bag_collection import (
    ShardedEmbeddingBagCollection,
)
from torchembed.modules.sharded.sharded_embedding_collection import ShardedEmbeddingCollection
from torchembed.ops.row_gradients import WeightGradient
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import TableSet


def _strictest_bounds_check(tables: Sequence[BatchedTables]) -> BoundsCheckMode:
    modes = {of_one.bounds_check for of_one in tables if isinstance(of_one, FusedTables)}
    strict = (BoundsCheckMode.FATAL, BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE)
    return next((mode for mode in strict if mode in modes), BoundsCheckMode.NONE)


class _CollectionView(ShardedCollection):
    """A collection that looks up in the tables of a TorchRec collection, and owns none."""

    def __init__(
        self,
        source: TorchrecBags | TorchrecSequences,
        configs: Sequence[EmbeddingConfig],
        ranks: TableRanks,
        container: str,
        *,
        is_weighted: bool,
    ) -> None:
        tables = source.tables
        bounds_check = _strictest_bounds_check(tables)
        is_fatal = bounds_check is BoundsCheckMode.FATAL
        (dtype,) = source.output_dtypes
        description = CollectionDescription(
            configs=tuple(configs),
            container=container,
            is_pooled=self.is_pooled,
            is_weighted=is_weighted,
            on_bad_id=OnBadId.RAISE if is_fatal else OnBadId.ZERO,
            output_dtype=dtype,
            weight_form=WeightGradient.DENSE,
            lookup_keys=(None,) * len(configs),
        )
        plans = {plan.table: plan for plan in source.table_plans}
        table_set = TableSet.over([group for of_one in tables for group in of_one.groups])
        numbers = {config.name: number for number, config in enumerate(configs)}
        held = HeldTables(
            table_set,
            tuple(numbers[table.spec.name] for table in table_set.tables),
            tuple(f"{table.spec.name}_{table.first_column}" for table in table_set.tables),
        )
        of_configs = [plans[config.name] for config in configs]
        super().__init__(description, of_configs, ranks, held, source.device)
        self._bounds_check = bounds_check
        self._num_bad = torch.zeros((), dtype=torch.int64, device=source.device)

    def _checked(self, batch: SparseFeatures) -> SparseFeatures:
        """``batch`` with ids checked as FBGEMM does: a bad id becomes id 0, and -1 is skipped."""
        checked = super()._checked(batch)
        if self._bounds_check in (BoundsCheckMode.FATAL, BoundsCheckMode.NONE):
            return checked
        is_bad = (checked.values < 0) & (batch.values != -1)
        takes_any = self._id_checks.free_positions(batch)
        if takes_any is not None:
            is_bad &= ~takes_any
        if batch.offsets is not None:
            # Padded batches have unused positions after the last bag, with arbitrary ids in them.
            positions = torch.arange(batch.values.numel(), device=batch.values.device)
            is_bad &= positions < batch.offsets[-1:]
        self._num_bad += is_bad.sum()
        return SparseFeatures(
            keys=checked.keys,
            values=checked.values.masked_fill(is_bad, 0),
            batch_size=checked.batch_size,
            offsets=checked.offsets,
            hotness=checked.hotness,
            weights=checked.weights,
        )

    def take_num_bad(self) -> int:
        """Number of bad ids since the last call, where FBGEMM would warn of them, else 0; waits for
        the device."""
        number = int(self._num_bad)
        self._num_bad.zero_()
        return number if self._bounds_check is BoundsCheckMode.WARNING else 0


class EmbeddingBagCollectionView(_CollectionView, ShardedEmbeddingBagCollection):
    """Looks up what ``source``, a TorchRec collection over torchembed's tables, would return for
    this rank's samples."""

    def __init__(self, source: TorchrecBags, ranks: TableRanks) -> None:
        names = source.output_names
        configs, is_weighted = _in_output_order(source.table_configs, names), source.takes_weights
        super().__init__(source, configs, ranks, "embedding_bags", is_weighted=is_weighted)
        self._names = names
        self._order = [self._feature_slots.names.index(name) for name in names]
        self._output_widths = [self._widths[slot] for slot in self._order]

    def _result(self, features: Tree, vectors: Tensor) -> KeyedTensor:
        if self._order != sorted(self._order):
            columns = vectors.split(self._widths, dim=1)
            vectors = torch.cat([columns[slot] for slot in self._order], dim=1)
        return KeyedTensor(self._names, self._output_widths, vectors, key_dim=1)


class EmbeddingCollectionView(_CollectionView, ShardedEmbeddingCollection):
    """Looks up what ``source``, a TorchRec collection over torchembed's tables, would return for
    this rank's samples."""

    def __init__(self, source: TorchrecSequences, ranks: TableRanks) -> None:
        configs = [as_config(config, EmbeddingConfig) for config in source.table_configs]
        super().__init__(source, configs, ranks, "embeddings", is_weighted=False)
        slots = self._feature_slots.names
        self._slots_of_names = {name: slots.index(name) for name in source.output_names}

    def _result(self, features: Tree, vectors: SequenceVectors) -> dict[str, JaggedTensor]:
        found = {}
        for name, slot in self._slots_of_names.items():
            values, offsets = vectors[slot]
            found[name] = JaggedTensor(values=values, offsets=offsets)
        return found


def _in_output_order(
    configs: Iterable[TorchrecBagConfig], names: Sequence[str]
) -> list[EmbeddingBagConfig]:
    """``configs`` in the order in which ``names`` has the tables' first results."""
    unordered = cast(
        "list[EmbeddingBagConfig]", [as_config(config, EmbeddingBagConfig) for config in configs]
    )
    slots = FeatureSlots(unordered)
    tables = [slots.tables[slots.names.index(name)] for name in names]
    return [unordered[table] for table in dict.fromkeys(tables)]


def collection_view(
    source: TorchrecBags | TorchrecSequences, ranks: TableRanks
) -> EmbeddingBagCollectionView | EmbeddingCollectionView:
    """Make the collection over the tables of ``source``."""
    if isinstance(source, TorchrecBags):
        return EmbeddingBagCollectionView(source, ranks)
    return EmbeddingCollectionView(source, ranks)
