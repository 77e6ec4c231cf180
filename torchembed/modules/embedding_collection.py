"""``EmbeddingCollection``: a vector for each id of many features."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.core.features import JaggedTensor, SparseFeatures, torchrec_class
from torchembed.core.types import OnBadId
from torchembed.modules.collection import Collection
from torchembed.modules.configs import EmbeddingConfig
from torchembed.modules.slots import SlotRows
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.sequence_lookup import sequence_lookup
from torchembed.tables import Table, group_weight


class EmbeddingCollection(Collection):
    """Looks up a vector for each id, without pooling, one fused call for each table group.

    Argument-compatible with TorchRec's. Takes :class:`~torchembed.SparseFeatures` or a
    ``KeyedJaggedTensor``; gives a dict from feature (``feature@table`` where several tables use it)
    to a :class:`~torchembed.JaggedTensor` with values ``[ids of the feature, D]``, or TorchRec's
    ``JaggedTensor`` where a ``KeyedJaggedTensor`` came in. On a GPU, jagged batches make the host
    wait for the features' sizes; batches with fixed hotness do not.

    Args:
        tables: :class:`~torchembed.EmbeddingConfig` or TorchRec's, names all different.
        device, on_bad_id, seed, output_dtype, sparse: as for
            :class:`~torchembed.EmbeddingBagCollection`.

    Raises:
        ValueError, TypeError: for configs or batches that do not fit.
        IndexError: in ``forward``, for a bad id: at once on the CPU, at a later call on a GPU.
    """

    _config_kind = EmbeddingConfig

    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        sparse: bool = False,
    ) -> None:
        super().__init__(tables, device, on_bad_id, seed)
        self.embeddings = self._table_weights()
        self._output_dtype = output_dtype
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((table, self.embeddings[table.spec.name]) for table in self._tables)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, in order."""
        return self._configs

    def _look_up(self, features: Any, lookups: SlotRows) -> dict[str, Any]:
        looked_up = sequence_slots(lookups, self._output_dtype, self._weight_form)
        kind = torchrec_class(features, "JaggedTensor") or JaggedTensor
        return {
            name: kind(values=values, offsets=offsets)
            for name, (values, offsets) in zip(self._feature_slots.names, looked_up, strict=True)
        }

    def _prepare(self, features: SparseFeatures, *, finds_runs: bool) -> SlotRows:
        return self._slots.prepare(self._feature_slots.batch(features), finds_runs=finds_runs)


def sequence_slots(
    rows: SlotRows, output_dtype: torch.dtype, weight_form: WeightGradient
) -> list[tuple[Tensor, Tensor]]:
    """For each slot ``([ids of the feature, D], offsets [B + 1])``; one call for each group."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for group_rows in rows.groups:
        entry, features, _ = group_rows
        vectors = sequence_lookup(
            group_weight(entry.group),
            features.values,
            output_dtype=output_dtype,
            weight_form=weight_form,
            sink=group_rows.sink(),
        )
        found.update(zip(entry.slots, split_slots(features, vectors), strict=True))
    return [found[slot] for slot in range(len(found))]


def split_slots(features: SparseFeatures, vectors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """``vectors [L, D]`` of all features as ``([ids of the feature, D], [B + 1])`` for each."""
    batch_size, num_features = features.batch_size, len(features.keys)
    if features.hotness is not None:
        parts = vectors.split([count * batch_size for count in features.hotness])
        bags = torch.arange(batch_size + 1, device=vectors.device)
        return [(part, bags * count) for part, count in zip(parts, features.hotness, strict=True)]
    assert features.offsets is not None
    starts = features.offsets[:: max(batch_size, 1)][: num_features + 1]
    bounds = starts.tolist() if batch_size else [0] * (num_features + 1)
    result = []
    for slot in range(num_features):
        offsets = features.offsets[slot * batch_size : (slot + 1) * batch_size + 1]
        result.append((vectors[bounds[slot] : bounds[slot + 1]], offsets - bounds[slot]))
    return result
