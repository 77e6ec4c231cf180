"""What the two collections share: their configs, tables, slots and names."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.types import OnBadId
from torchembed.modules.configs import EmbeddingConfig, as_config
from torchembed.modules.slots import Slots, select_features
from torchembed.modules.table_module import TableModule, TableWeight, as_on_bad_id
from torchembed.tables import Table


class Collection(TableModule):
    """Several tables, each looked up by one or more features.

    A slot is one use of a table by a feature; slots come in the order of the tables, and of each
    table's features.
    """

    _config_kind: type[EmbeddingConfig]

    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None,
        on_bad_id: OnBadId | str,
        seed: int,
    ) -> None:
        super().__init__()
        self._configs = [as_config(config, self._config_kind) for config in tables]
        duplicates = [n for n, c in Counter(c.name for c in self._configs).items() if c > 1]
        if duplicates:
            raise ValueError(f"tables must have different names, got {duplicates} more than once")
        self._on_bad_id = as_on_bad_id(on_bad_id)
        self._seed = seed
        self._tables = [Table(config.spec(seed)) for config in self._configs]
        self._hold(self._tables, [self._lookup_key(config) for config in self._configs], device)
        slots = [
            (t, name) for t, config in enumerate(self._configs) for name in config.feature_names
        ]
        self._slot_tables = [table for table, _ in slots]
        self._slot_features = [name for _, name in slots]
        uses = Counter(self._slot_features)
        self._slot_names = [
            name if uses[name] == 1 else f"{name}@{self._configs[table].name}"
            for table, name in slots
        ]
        self._slots = Slots(
            self._table_set,
            [self._tables[table] for table in self._slot_tables],
            self._slot_features,
            self._on_bad_id,
        )
        self._indices_of_keys: dict[tuple[str, ...], list[int]] = {}

    def _lookup_key(self, config: EmbeddingConfig) -> Any:
        """What tables must have in common, besides dim and dtype, to be looked up in one call."""
        return None

    def _table_weights(self) -> nn.ModuleDict:
        return nn.ModuleDict({t.spec.name: TableWeight(t) for t in self._tables})

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._tables[0].parameter.device

    def _slot_indices(self, keys: tuple[str, ...]) -> list[int]:
        """For each slot, the index of its feature among ``keys``."""
        indices = self._indices_of_keys.get(keys)
        if indices is None:
            missing = sorted(set(self._slot_features) - set(keys))
            if missing:
                raise ValueError(f"features must have the keys {missing}, got {list(keys)}")
            indices = [keys.index(name) for name in self._slot_features]
            self._indices_of_keys[keys] = indices
        return indices

    def _slot_batch(self, features: Any) -> SparseFeatures:
        """``features`` (ours or a ``KeyedJaggedTensor``) with exactly one feature for each slot."""
        batch = as_sparse_features(features)
        return select_features(batch, self._slot_indices(batch.keys))

    def check_ids(self) -> None:
        """Wait for the GPU and raise for a bad id of any batch so far; on the CPU nothing waits."""
        self._slots.bad_ids.check(wait=True)

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        raise NotImplementedError
