"""A run of a model that records how features reach its table modules."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.checks import signed_ids
from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.mixed_features import MixedFeatures
from torchembed.modules.dense_part.argument_tree import AnyFeatures, ArgumentTree
from torchembed.modules.dense_part.errors import DeployError
from torchembed.modules.dense_part.forms import Combining, Feature, Lookup
from torchembed.modules.dense_part.id_places import IdPlaces
from torchembed.modules.dense_part.table_modules import (
    TableSource,
    configs_of,
    is_collection,
    is_embedding_bag,
    is_pooled,
    table_sources,
)
from torchembed.modules.lookup.feature_selection import select_features
from torchembed.modules.served_names import (
    ServedTables,
    served_modules,
    table_names,
    tied_weights,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One call of a table module.

    Attributes:
        lookups: positions of its lookups, one for each result.
        names: of the results of a collection.
        kind: the class of the result, and of its parts where it is a mapping.
        part_kind: the class of the parts.
        dtype: of the vectors.
        shape: of the result of a module of one table, without the samples.
    """

    lookups: tuple[int, ...]
    names: tuple[str, ...] = ()
    kind: type
    part_kind: type | None = None
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


class GivenIds(NamedTuple):
    """The ids of a feature in the examples, as requests have them.

    Attributes:
        ids: int32 or int64, ``[B, hotness]``; ``[L]`` of jagged features.
        lengths: of the bags of a jagged feature, int64 ``[B]``.
        weights: floating, in the form of ``ids``.
    """

    ids: Tensor
    lengths: Tensor | None
    weights: Tensor | None


class Recording:
    """The run of a model with examples: its features, lookups and tables.

    Attributes:
        features: by name.
        jagged: values ``[L, D]`` and lengths ``[B]`` of the examples, by the position of a lookup
            of each id's vector, where the feature is jagged.
        lookups: each use of a table by a feature, once.
        tables: those that are looked up, by name.
        calls: of each table module, by its path, in order.
        given: the ids of the examples, by feature.
        packed: the name of the offsets that a feature of packed ids lies between, by its own.
        batch_size: samples of the examples.
        result: of the model's forward.
    """

    def __init__(self, model: nn.Module, tree: ArgumentTree) -> None:
        """Run ``model`` once; as it is, in evaluation mode, without gradients.

        Raises:
            DeployError: where what a table looks up does not come straight from the arguments.
        """
        self.features: dict[str, Feature] = {}
        self.lookups: list[Lookup] = []
        self.tables: dict[str, TableSource] = {}
        self.calls: dict[str, list[RecordedCall]] = {}
        self.jagged: dict[int, tuple[Tensor, Tensor]] = {}
        self.given: dict[str, GivenIds] = {}
        self.packed: dict[str, str] = {}
        self._modules = served_modules(model)
        if not self._modules:
            raise DeployError(
                "model must have tables of torchembed, and has none; serve it as it is, or give it "
                "a torchembed.EmbeddingBagCollection"
            )
        self._names, self._tied = table_names(model), tied_weights(model)
        self._sizes: set[int] = set()
        # Copies: views of one tensor would be taken for each other.
        leaves = {n: _own_memory(leaf) for n, leaf in tree.leaves.items()}
        tensors = {n: t for n, t in leaves.items() if isinstance(t, Tensor)}
        self.places = IdPlaces(tensors, tree.packed)
        self._sparse = {n: f for n, f in leaves.items() if not isinstance(f, Tensor)}
        self._find_features(self._sparse)
        hooks = [
            module.register_forward_hook(self._recorder(path), with_kwargs=True)
            for path, module in self._modules.items()
        ]
        try:
            with torch.no_grad():
                self.result: object = model(*tree.with_leaves(leaves))
        finally:
            for hook in hooks:
                hook.remove()
        if len(self._sizes) != 1:
            raise DeployError(
                f"all tables must be looked up for one number of samples, got "
                f"{sorted(self._sizes) or 'no lookup at all'}"
            )
        (self.batch_size,) = self._sizes
        if self.batch_size < 2:
            raise DeployError(
                f"examples must hold at least 2 samples, so that their number can be told from a "
                f"constant, got {self.batch_size}"
            )

    def _find_features(self, sparse: Mapping[str, AnyFeatures]) -> None:
        for features in sparse.values():
            for part in _parts(features):
                self._sizes.add(part.batch_size)
                for place, key in enumerate(part.keys):
                    hotness = None if part.hotness is None else part.hotness[place]
                    # A weighted lookup makes it a weighted feature.
                    self._add(Feature(name=key, hotness=hotness, is_weighted=False))
                    self._give(key, _given(select_features(part, [place])))

    def _add(self, feature: Feature) -> None:
        known = self.features.setdefault(feature.name, feature)
        if known.hotness != feature.hotness:
            raise DeployError(
                f"feature {feature.name} must have one form in all arguments, got hotness "
                f"{known.hotness} and {feature.hotness}"
            )
        if feature.is_weighted:
            self.features[feature.name] = feature

    def _give(self, name: str, given: GivenIds) -> None:
        """Take note of the ids of a feature, which may come by several arguments and calls."""
        known = self.given.setdefault(name, given)
        for what, before, now in zip(GivenIds._fields, known, given, strict=True):
            if before is not None and now is not None and not _are_equal(before, now):
                raise DeployError(
                    f"feature {name} must be the same in all arguments and lookups, since requests "
                    f"give it once, and its {what} are not; give the others under another name"
                )
        if known.weights is None:
            self.given[name] = known._replace(weights=given.weights)

    def _recorder(self, path: str) -> Any:
        def record(
            module: ServedTables, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
        ) -> None:
            names = ("features",) if is_collection(module) else _ARGUMENTS
            arguments = dict(zip(names, args, strict=False)) | kwargs
            make = self._collection_call if is_collection(module) else self._single_call
            self.calls.setdefault(path, []).append(make(path, module, arguments, result))

        return record

    def _collection_call(
        self, path: str, module: ServedTables, arguments: dict[str, Any], result: Any
    ) -> RecordedCall:
        (features,) = arguments.values()
        if not any(features is known for known in self._sparse.values()):
            raise DeployError(
                f"features of {path} must be an argument of the model as it came, and are made in "
                "its forward; make them before"
            )
        weighted = getattr(module, "is_weighted", lambda: False)()
        lookups = []
        for source, config in zip(table_sources(path, module), configs_of(module), strict=True):
            table = self._table(path, source)
            pooling = Combining(config.pooling.value) if is_pooled(module) else Combining.EACH
            lookups += [
                self._lookup(feature, table, pooling, weighted, None)
                for feature in config.feature_names
            ]
        is_keyed = is_pooled(module)
        if not is_keyed:
            for number, vectors in zip(lookups, result.values(), strict=True):
                if self.features[self.lookups[number].feature].hotness is None:
                    lengths = vectors.offsets().diff()
                    self.jagged[number] = (vectors.values().detach().float(), lengths.long())
        parts = {} if is_keyed else result
        values = result.values() if is_keyed else next(iter(parts.values())).values()
        return RecordedCall(
            lookups=tuple(lookups),
            names=tuple(result.keys()),
            kind=type(result),
            part_kind=None if is_keyed else type(next(iter(parts.values()))),
            dtype=values.dtype,
        )

    def _single_call(
        self, path: str, module: Any, arguments: dict[str, Any], result: Tensor
    ) -> RecordedCall:
        (source,) = table_sources(path, module)
        table, ids = self._table(path, source), arguments["input"]
        weights = arguments.get("per_sample_weights")
        offsets = arguments.get("offsets")
        if is_embedding_bag(module) and module.mode == "max":
            raise DeployError(
                f"{path} must pool by sums or means to be served, got mode='max'; look vectors up "
                "by an Embedding and take their maximum"
            )
        pools = is_embedding_bag(module)
        batch_size = result.shape[0]
        place = self.places.find(path, ids, offsets, weights, batch_size, is_each=not pools)
        if place.offsets is not None:
            self.packed[place.name] = place.offsets
            offsets = self.places.offsets_of(place)
            batch_size = len(offsets) - 1
        self._sizes.add(batch_size)
        feature = Feature(name=place.name, hotness=place.hotness, is_weighted=weights is not None)
        self._add(feature)
        given = _given_to_module(ids, offsets, weights, batch_size)
        self._give(place.name, given)
        number = self._lookup(
            place.name,
            table,
            Combining(module.mode) if pools else Combining.EACH,
            weights is not None,
            module.padding_idx if pools else None,
        )
        if place.offsets is not None:
            assert given.lengths is not None
            self.jagged[number] = (result[: len(given.ids)].detach().float(), given.lengths)
        return RecordedCall(
            lookups=(number,), kind=Tensor, dtype=result.dtype, shape=tuple(result.shape[1:])
        )

    def _table(self, path: str, source: TableSource) -> str:
        weight = self._tied.get(source.weight_name, source.weight_name)
        name = self._names[weight]
        source = source._replace(name=name, weight_name=weight)
        known = self.tables.setdefault(name, source)
        if known != source:
            raise DeployError(
                f"modules of one weight must treat ids without a row alike, and {path} treats them "
                f"otherwise than another module of {weight}; give both one on_bad_id"
            )
        return name

    def _lookup(
        self, feature: str, table: str, combining: Combining, weighted: bool, padding: int | None
    ) -> int:
        if weighted:
            self._add(dataclasses.replace(self.features[feature], is_weighted=True))
        lookup = Lookup(
            feature=feature,
            table=table,
            combining=combining,
            is_weighted=weighted,
            padding_id=padding,
        )
        if lookup not in self.lookups:
            self.lookups.append(lookup)
        return self.lookups.index(lookup)


_ARGUMENTS = ("input", "offsets", "per_sample_weights")


def _own_memory(leaf: Tensor | AnyFeatures) -> Tensor | AnyFeatures:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """True for the same numbers in the same order, of whatever dtypes and shapes."""
    dtype = torch.float64 if one.is_floating_point() else torch.int64
    return torch.equal(one.flatten().cpu().to(dtype), other.flatten().cpu().to(dtype))


def _given(features: SparseFeatures) -> GivenIds:
    """The ids of an only feature."""
    values, weights = features.values, features.weights
    if features.offsets is None:
        shape = features.batch_size, -1
        return GivenIds(
            values.reshape(shape), None, None if weights is None else weights.reshape(shape)
        )
    end = int(features.offsets[-1])
    lengths = features.offsets.diff().long()
    return GivenIds(values[:end], lengths, None if weights is None else weights[:end])


def _given_to_module(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, batch_size: int
) -> GivenIds:
    """The ids of a call of a module of one table."""
    ids = signed_ids("input", ids)
    if offsets is None:
        shape = batch_size, -1
        return GivenIds(
            ids.reshape(shape), None, None if weights is None else weights.reshape(shape)
        )
    ends = offsets
    if len(offsets) == batch_size:
        ends = torch.cat([offsets, offsets.new_tensor([len(ids)])])
    end = int(ends[-1])
    return GivenIds(ids[:end], ends.diff().long(), None if weights is None else weights[:end])


def _parts(features: AnyFeatures) -> tuple[SparseFeatures, ...]:
    if isinstance(features, MixedFeatures):
        return features.parts
    return (as_sparse_features(features),)
