"""``EmbeddingCollection``: a vector for each id of many features."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.features import Features, SparseFeatures, torchrec_class
from torchembed.core.lookup_results import JaggedTensor
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.stand_ins import is_stand_in
from torchembed.core.trees import Tree
from torchembed.core.types import OnBadId
from torchembed.modules.collection import Collection
from torchembed.modules.configs import ConfigLike, EmbeddingConfig
from torchembed.modules.lookup.feature_selection import lengths_of_features, num_ids_of_features
from torchembed.modules.lookup.slots import SlotRows, Slots
from torchembed.modules.lookup.spread_ids import IdSpreader
from torchembed.modules.lookup.stateless_lookup import Lookup
from torchembed.modules.lookup.table_lookup import look_up
from torchembed.modules.traced.traced_slots import traced_num_ids
from torchembed.ops.row_gradients import WeightGradient
from torchembed.tables import Admission, Table


class EmbeddingCollection(Collection["SizedFeatures", "SizedRows", "SequenceVectors"]):
    """Looks up a vector for each id, without pooling, in many tables, as TorchRec's of this name.

    Tables of the same dim and dtype are one lookup. ``forward`` takes
    :class:`~torchembed.SparseFeatures`, :class:`~torchembed.MixedFeatures` or a
    ``KeyedJaggedTensor``. It returns a dict from feature (``feature@table`` if several tables use
    it) to a :class:`~torchembed.JaggedTensor` with values ``[ids of the feature, D]``, or
    TorchRec's ``JaggedTensor`` for a ``KeyedJaggedTensor``. On a GPU, jagged batches make the host
    wait for the features' sizes; batches of fixed hotness do not.

    Args:
        tables: :class:`~torchembed.EmbeddingConfig` or TorchRec's, with different names.
        device, on_bad_id, seed, output_dtype, sparse: as for
            :class:`~torchembed.EmbeddingBagCollection`.

    Raises:
        ValueError, TypeError: for configs or batches that do not fit, in ``forward`` too.
        IndexError: in ``forward``, for a bad id: at once on the CPU, at a later call on a GPU.
    """

    is_pooled = False
    _config_kind = EmbeddingConfig
    _container = "embeddings"

    def __init__(
        self,
        tables: Sequence[ConfigLike],
        device: torch.device | str | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int = 0,
        output_dtype: torch.dtype | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__(tables, device, on_bad_id, seed, output_dtype)
        self.embeddings = self._table_weights()
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE
        self._spread_ids = IdSpreader()

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((table, self.embeddings[table.spec.name]) for table in self._tables)

    def _torch_module(self, config: EmbeddingConfig, weight: Tensor) -> nn.Embedding:
        is_sparse = self._weight_form is WeightGradient.SPARSE
        num_rows, dim = weight.shape
        return nn.Embedding(num_rows, dim, sparse=is_sparse, _weight=weight)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, in order."""
        return self._configs

    def lookup(self, features: Features | MixedFeatures) -> Lookup[dict[str, JaggedTensor]]:
        """The vectors of ``forward``, and which ids were bad, without raising: for servers.

        Changes nothing, takes no part in autograd or in an optimizer's steps, and several threads
        may call it at once. Bad ids are looked up as the module treats them, under
        ``on_bad_id="raise"`` as under ``"zero"``.

        Raises:
            ValueError, TypeError: for a batch that does not fit.
        """
        vectors, bad_ids = self._stateless(features)
        return Lookup(self._result(features, vectors), bad_ids)

    def _exchange_sizes(self, features: SparseFeatures, *, ahead: bool) -> "SizedFeatures":
        batch = self._feature_slots.batch(features)
        return SizedFeatures(batch, num_ids_of_features(batch).tolist())

    def _bucketize(self, features: SparseFeatures) -> "SizedFeatures":
        batch = self._feature_slots.batch(features, has_capacity=True)
        is_known = batch.hotness is not None
        return SizedFeatures(batch, num_ids_of_features(batch).tolist() if is_known else None)

    def _needed_capacity(self, ids: "SizedFeatures") -> Tensor | None:
        return None if ids.num_ids is not None else lengths_of_features(ids.features)

    def _route(self, ids: "SizedFeatures", capacity: Sequence[int] | None) -> "SizedRows":
        return routed_sequences(self._slots, ids, self._spread_ids, capacity)

    def _admit(
        self, ids: "SizedRows", admission: Admission | None, *, finds_runs: bool
    ) -> "SizedRows":
        rows = self._slots.admit(ids.rows, admission, finds_runs=finds_runs)
        return ids._replace(rows=rows)

    def _fetch_refused(self, rows: "SizedRows") -> None:
        self._slots.fetch_refused(rows.rows)

    def _look_up(self, rows: "SizedRows", *, ahead: bool) -> "SequenceVectors":
        return sequence_slots(*rows, self._output_dtype, self._weight_form)

    def _traced(self, batch: SparseFeatures) -> "SequenceVectors":
        slots = self._traced_slots()
        parts = slots.sequences(self._feature_slots.batch(batch), self._output_dtype)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part in parts:
            num_ids = traced_num_ids(part.features)
            split = split_slots(part.features, num_ids, part.vectors)
            found.update(zip(part.slots, split, strict=True))
        return [found[slot] for slot in range(len(found))]

    def _in_order(self, parts: "list[tuple[Sequence[int], SequenceVectors]]") -> "SequenceVectors":
        return vectors_in_order(parts)

    def _result(self, features: Tree, vectors: "SequenceVectors") -> dict[str, JaggedTensor]:
        return jagged_result(features, self._feature_slots.names, vectors)


class SizedFeatures(NamedTuple):
    """A batch, with the number of ids of each feature on the host."""

    features: SparseFeatures
    num_ids: list[int] | None
    """Number of ids of each feature; None for jagged ones whose capacity the host knows alone."""


class SizedRows(NamedTuple):
    """Rows of slots, with the number of ids of each on the host."""

    rows: SlotRows
    num_ids: list[int]
    """Number of ids of each slot, or of places for them."""
    offsets: Tensor | None = None
    """``[slots, B + 1]``, where slots have places for more ids than their bags hold."""


def routed_sequences(
    slots: Slots, ids: SizedFeatures, spread_ids: IdSpreader, places: Sequence[int] | None
) -> SizedRows:
    """The rows of ``ids``, which has a feature for each of the ``slots``; in so many ``places`` for
    each where the host does not know how many ids they have."""
    if ids.num_ids is not None:
        return SizedRows(slots.route(ids.features, ids.num_ids), ids.num_ids)
    assert places is not None
    spread = spread_ids(ids.features, places)
    rows = slots.route(spread.features, is_valid=spread.is_id)
    return SizedRows(rows, list(places), spread.offsets)


SequenceVectors = list[tuple[Tensor, Tensor]]
"""For each slot ``([ids of the feature, D], offsets [B + 1])``."""


def vectors_in_order(parts: list[tuple[Sequence[int], SequenceVectors]]) -> SequenceVectors:
    """The vectors of all slots from those of parts, each after the numbers of its slots."""
    pairs = (zip(slots, vectors, strict=True) for slots, vectors in parts)
    found = dict(itertools.chain.from_iterable(pairs))
    return [found[slot] for slot in range(len(found))]


def jagged_result(
    features: Tree, names: list[str], vectors: SequenceVectors
) -> dict[str, JaggedTensor]:
    """``vectors`` of the slots by name, as TorchRec's class where its ``features`` came in."""
    kind = torchrec_class(features, "JaggedTensor") or JaggedTensor
    return {
        name: kind(values=values, offsets=offsets)
        for name, (values, offsets) in zip(names, vectors, strict=True)
    }


def sequence_slots(
    rows: SlotRows,
    num_ids: Sequence[int],
    offsets: Tensor | None,
    output_dtype: torch.dtype,
    weight_form: WeightGradient,
) -> SequenceVectors:
    """The vectors of each slot, of ``num_ids`` ids, with ``offsets`` where these are not those of
    ``rows``; one call for each group."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    of_groups = group_vectors(rows, output_dtype, weight_form)
    for group_rows, vectors in zip(rows.groups, of_groups, strict=True):
        entry, features = group_rows.entry, group_rows.features
        of_slots = [num_ids[slot] for slot in entry.slots]
        if offsets is None:
            split = split_slots(features, of_slots, vectors)
        else:
            bags = offsets.unbind()
            pairs = zip(vectors.split(of_slots), entry.slots, strict=True)
            split = [(part, bags[slot]) for part, slot in pairs]
        found.update(zip(entry.slots, split, strict=True))
    return [found[slot] for slot in range(len(found))]


def group_vectors(
    rows: SlotRows, output_dtype: torch.dtype, weight_form: WeightGradient
) -> list[Tensor]:
    """For each group of ``rows`` the vectors of its features, ``[L, D]``."""
    return [
        look_up(
            of_group.entry.group,
            of_group.features.values,
            sink=of_group.sink(),
            output_dtype=output_dtype,
            weight_form=weight_form,
            missing=of_group.missing(),
            fetched=of_group.fetched,
        )
        for of_group in rows.groups
    ]


def split_slots(
    features: SparseFeatures, num_ids: Sequence[int], vectors: Tensor
) -> SequenceVectors:
    """``vectors [L, D]`` of all features, of ``num_ids`` ids each, one by one."""
    # Ids after the last bag have vectors too, which belong to no feature.
    parts = vectors.split([*num_ids, vectors.shape[0] - sum(num_ids)])[:-1]
    return list(zip(parts, _offsets_of_slots(features, num_ids), strict=True))


def _offsets_of_slots(features: SparseFeatures, num_ids: Sequence[int]) -> Iterable[Tensor]:
    """``[B + 1]`` for each feature: where its bags begin and end among its own ids."""
    batch_size, device = features.batch_size, features.values.device
    if torch.compiler.is_compiling() or is_stand_in(features.values) or not batch_size:
        return _traced_offsets_of_slots(features, num_ids)
    if features.hotness is not None:
        return fixed_offsets(features.hotness, batch_size, device)
    # One launch, since each takes a GPU as long as it takes for a thousand offsets.
    assert features.offsets is not None
    of_slots = features.offsets.unfold(0, batch_size + 1, batch_size)
    return (of_slots - of_slots[:, :1]).unbind()


def fixed_offsets(hotness: Sequence[int], batch_size: int, device: torch.device) -> list[Tensor]:
    """``[B + 1]`` for each hotness: where the bags of its feature begin and end."""
    # A launch for all of one hotness.
    bags = torch.arange(batch_size + 1, device=device)
    uses = Counter(hotness)
    of_count = {n: (bags.expand(uses[n], -1) * n).unbind() for n in uses}
    rows = {n: iter(found) for n, found in of_count.items()}
    return [next(rows[n]) for n in hotness]


def _traced_offsets_of_slots(features: SparseFeatures, num_ids: Sequence[int]) -> Iterable[Tensor]:
    """:func:`_offsets_of_slots` one by one: numbers may be variables of the program, and there may
    be no bag."""
    batch_size = features.batch_size
    if features.hotness is not None:
        bags = torch.arange(batch_size + 1, device=features.values.device)
        return [bags * count for count in features.hotness]
    assert features.offsets is not None
    result, first = [], 0
    for slot, count in enumerate(num_ids):
        offsets = features.offsets[slot * batch_size : (slot + 1) * batch_size + 1]
        result.append(offsets - first)
        first += count
    return result
