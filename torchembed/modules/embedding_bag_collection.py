"""``EmbeddingBagCollection``: pooled vectors of many features."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.core.features import KeyedTensor, SparseFeatures, torchrec_class
from torchembed.core.types import OnBadId, Pooling
from torchembed.modules.collection import Collection
from torchembed.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.modules.slots import GroupSlots, Slots, select_features
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import Table, group_weight


def pooled_group_lookup(
    slots: Slots,
    entry: GroupSlots,
    features: SparseFeatures,
    pooling: Pooling,
    output_dtype: torch.dtype,
    weight_form: WeightGradient,
) -> Tensor:
    """``[B, slots of the group, D]`` for ``features`` that hold exactly the group's slots."""
    group = entry.group
    return pooled_lookup(
        group_weight(group),
        slots.rows(entry, features),
        offsets=features.offsets,
        hotness=features.hotness,
        batch_size=features.batch_size,
        num_features=len(entry.slots),
        per_id_weights=features.weights,
        pooling=pooling,
        output_dtype=output_dtype,
        weight_form=weight_form,
        sink=None if group.rule is None else group.record,
    )


class EmbeddingBagCollection(Collection):
    """Looks up and pools the ids of many features, one fused call for each table group.

    Argument-compatible with TorchRec's. Takes :class:`~torchembed.SparseFeatures` or a
    ``KeyedJaggedTensor``; extra keys are ignored and keys may come in any order. Gives a
    :class:`~torchembed.KeyedTensor`, or TorchRec's where a ``KeyedJaggedTensor`` came in, with
    ``values [B, sum of dims]`` in the order of the tables and of each table's features. A feature
    that several tables use has the key ``feature@table``. Empty bags give zeros.

    Initial rows are functions of (seed, table name, row).

    Args:
        tables: :class:`~torchembed.EmbeddingBagConfig` or TorchRec's, names all different.
        is_weighted: multiply each id's vector by the batch's weights, which are ignored otherwise.
        device: where to make the tables; ``"meta"`` makes none.
        on_bad_id: ``"raise"``, ``"clamp"`` or ``"zero"``, for ids outside their table.
        seed: of the initial rows.
        output_dtype: of the pooled vectors.
        sparse: without a fused optimizer, ``weight.grad`` is a sparse tensor instead of a dense one.

    Raises:
        ValueError, TypeError: for configs or batches that do not fit.
        IndexError: in ``forward``, for a bad id: at once on the CPU, at a later call on a GPU.
    """

    _config_kind = EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        sparse: bool = False,
    ) -> None:
        super().__init__(tables, device, on_bad_id, seed)
        self.embedding_bags = self._table_weights()
        self._is_weighted = is_weighted
        self._output_dtype = output_dtype
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE

    def _lookup_key(self, config: EmbeddingConfig) -> Any:
        assert isinstance(config, EmbeddingBagConfig)
        return config.pooling

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((table, self.embedding_bags[table.spec.name]) for table in self._tables)

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """True where ids have weights."""
        return self._is_weighted

    def forward(self, features: Any) -> Any:
        batch = self._slot_batch(features)
        if not self._is_weighted and batch.weights is not None:
            batch = SparseFeatures(
                keys=batch.keys,
                values=batch.values,
                batch_size=batch.batch_size,
                offsets=batch.offsets,
                hotness=batch.hotness,
            )
        elif self._is_weighted and batch.weights is None:
            raise ValueError("features must have weights, since is_weighted is set; got none")
        pooled: list[Tensor] = []
        order: list[int] = []
        for entry in self._slots.by_group():
            vectors = pooled_group_lookup(
                self._slots,
                entry,
                select_features(batch, entry.slots),
                self._configs[self._slot_tables[entry.slots[0]]].pooling,
                self._output_dtype,
                self._weight_form,
            )
            pooled.append(vectors)
            order.extend(entry.slots)
        return keyed_result(features, self._slot_names, pooled, order)


def keyed_result(
    features: Any, names: list[str], pooled: list[Tensor], order: list[int]
) -> KeyedTensor:
    """Side by side in slot order: ``pooled`` holds ``[B, n, D]`` of the slots that ``order`` names."""
    if len(pooled) == 1:
        values, widths = pooled[0].flatten(1), [pooled[0].shape[2]] * len(names)
    else:
        columns: list[Tensor] = [pooled[0]] * len(names)
        vectors = [vector for group in pooled for vector in group.unbind(1)]
        for slot, vector in zip(order, vectors, strict=True):
            columns[slot] = vector
        values, widths = torch.cat(columns, dim=1), [c.shape[1] for c in columns]
    theirs = torchrec_class(features, "KeyedTensor")
    return (theirs or KeyedTensor)(keys=names, length_per_key=widths, values=values)
