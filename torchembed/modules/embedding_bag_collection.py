"""``EmbeddingBagCollection``: pooled vectors of many features."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from torchembed.core.features import Features, SparseFeatures, torchrec_class
from torchembed.core.lookup_results import KeyedTensor
from torchembed.core.mixed_features import MixedFeatures
from torchembed.core.trees import Tree
from torchembed.core.types import OnBadId
from torchembed.modules.collection import Collection
from torchembed.modules.configs import ConfigLike, EmbeddingBagConfig, EmbeddingConfig
from torchembed.modules.lookup.pooled_slots import columns_of_slots, pooled_slots
from torchembed.modules.lookup.slots import SlotRows
from torchembed.modules.lookup.stateless_lookup import Lookup
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.side_by_side import after_reserved
from torchembed.tables import Admission, Table


class EmbeddingBagCollection(Collection[SparseFeatures, SlotRows, Tensor]):
    """Looks up and pools the ids of many features in many tables, as TorchRec's of this name.

    Tables of the same dim, dtype and pooling are one lookup. ``forward`` takes
    :class:`~torchembed.SparseFeatures`, :class:`~torchembed.MixedFeatures` or a
    ``KeyedJaggedTensor``. It ignores keys that no table uses; keys may come in any order. It
    returns a :class:`~torchembed.KeyedTensor`, or TorchRec's for a ``KeyedJaggedTensor``, with
    ``values [B, sum of dims]`` in the order of the tables and of each table's features. A feature
    that several tables use has the key ``feature@table``. Empty bags give zeros.

    Initial rows are a function of (seed, table name, row).

    ``reserved_columns``, an attribute to be set before sharding, allocates columns before the
    vectors of each result for the tensors that :func:`~torchembed.ops.side_by_side.side_by_side`,
    or :class:`~torchembed.modules.LowRankCross`, is given in front of them, which then copies no
    vectors. ``values()`` is then a view that is not contiguous.

    Args:
        tables: :class:`~torchembed.EmbeddingBagConfig` or TorchRec's, with different names.
        is_weighted: multiplies each id's vector by its weight in the batch; False ignores weights.
        device: where to make the tables. ``"meta"`` makes none, for ``shard_embeddings`` to do.
        on_bad_id: ``"raise"``, ``"clamp"`` or ``"zero"``, for ids outside their table.
        seed: of the initial rows.
        output_dtype: of the pooled vectors. None means float32, whatever the tables' dtype, until
            the module is cast, as by ``.half()``, which casts the vectors too.
        sparse: without a fused optimizer, makes ``weight.grad`` sparse instead of dense.

    Raises:
        ValueError, TypeError: for configs or batches that do not fit, in ``forward`` too.
        IndexError: in ``forward``, for a bad id: at once on the CPU, at a later call on a GPU.
    """

    _config_kind = EmbeddingBagConfig
    _container = "embedding_bags"
    _configs: list[EmbeddingBagConfig]  # type: ignore[assignment]

    def __init__(
        self,
        tables: Sequence[ConfigLike],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        on_bad_id: OnBadId | str = OnBadId.RAISE,
        seed: int = 0,
        output_dtype: torch.dtype | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__(tables, device, on_bad_id, seed, output_dtype)
        self.embedding_bags = self._table_weights()
        self._is_weighted = is_weighted
        self._weight_form = WeightGradient.SPARSE if sparse else WeightGradient.DENSE

    def _lookup_key(self, config: EmbeddingConfig) -> Hashable:
        assert isinstance(config, EmbeddingBagConfig)
        return config.pooling

    def _holders(self) -> Iterable[tuple[Table, nn.Module]]:
        return ((table, self.embedding_bags[table.spec.name]) for table in self._tables)

    def _torch_module(self, config: EmbeddingConfig, weight: Tensor) -> nn.EmbeddingBag:
        assert isinstance(config, EmbeddingBagConfig)
        return nn.EmbeddingBag(
            config.num_embeddings,
            config.embedding_dim,
            mode=config.pooling.value,
            sparse=self._weight_form is WeightGradient.SPARSE,
            include_last_offset=True,
            _weight=weight,
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """True if the weights of ids are used."""
        return self._is_weighted

    def lookup(self, features: Features | MixedFeatures) -> Lookup[KeyedTensor]:
        """The vectors of ``forward``, and which ids were bad, without raising: for servers.

        Changes nothing, takes no part in autograd or in an optimizer's steps, and several threads
        may call it at once. Bad ids are looked up as the module treats them, under
        ``on_bad_id="raise"`` as under ``"zero"``.

        Raises:
            ValueError, TypeError: for a batch that does not fit.
        """
        vectors, bad_ids = self._stateless(features)
        return Lookup(self._result(features, vectors), bad_ids)

    def _exchange_sizes(self, features: SparseFeatures, *, ahead: bool) -> SparseFeatures:
        return weighted_as_asked(self._feature_slots.batch(features), self._is_weighted)

    def _bucketize(self, features: SparseFeatures) -> SparseFeatures:
        batch = self._feature_slots.batch(features, has_capacity=True)
        return weighted_as_asked(batch, self._is_weighted)

    def _route(self, ids: SparseFeatures, capacity: Sequence[int] | None) -> SlotRows:
        return self._slots.route(ids, has_capacity=capacity is not None)

    def _admit(self, ids: SlotRows, admission: Admission | None, *, finds_runs: bool) -> SlotRows:
        return self._slots.admit(ids, admission, finds_runs=finds_runs)

    def _fetch_refused(self, rows: SlotRows) -> None:
        self._slots.fetch_refused(rows)

    def _look_up(self, rows: SlotRows, *, ahead: bool) -> Tensor:
        poolings = [self._configs[table].pooling for table in self._feature_slots.tables]
        return pooled_slots(
            rows, poolings, self._output_dtype, self._weight_form, self.reserved_columns
        )

    def _traced(self, batch: SparseFeatures) -> Tensor:
        poolings = [self._configs[table].pooling for table in self._feature_slots.tables]
        weighted = weighted_as_asked(self._feature_slots.batch(batch), self._is_weighted)
        slots = self._traced_slots()
        return slots.pooled(weighted, poolings, self._output_dtype, self.reserved_columns)

    def _in_order(self, parts: list[tuple[Sequence[int], Tensor]]) -> Tensor:
        return columns_of_slots(parts, self._slot_widths(), self.reserved_columns)

    def _slot_widths(self) -> list[int]:
        return [self._configs[table].embedding_dim for table in self._feature_slots.tables]

    def _result(self, features: Tree, vectors: Tensor) -> KeyedTensor:
        widths = self._slot_widths()
        values = after_reserved(vectors, self.reserved_columns)
        return keyed_result(features, self._feature_slots.names, widths, values)


def weighted_as_asked(batch: SparseFeatures, is_weighted: bool) -> SparseFeatures:
    """``batch``, without its weights where the collection is not weighted.

    Raises:
        ValueError: where the collection is weighted and the batch has no weights.
    """
    if is_weighted and batch.weights is None:
        raise ValueError("features must have weights, since is_weighted is set; got none")
    return batch if is_weighted else dataclasses.replace(batch, weights=None)


def keyed_result(
    features: Tree, names: list[str], widths: list[int], values: Tensor
) -> KeyedTensor:
    """``values [B, sum of widths]`` by name, TorchRec's class where its ``features`` came in."""
    kind = torchrec_class(features, "KeyedTensor") or KeyedTensor
    return kind(keys=names, length_per_key=widths, values=values)
