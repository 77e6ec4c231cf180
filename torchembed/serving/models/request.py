"""Requests: their arrays, checked, and the features that tables look up for them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed.core.features import SparseFeatures
from torchembed.modules.dense_part.forms import BadIds, Feature
from torchembed.serving.interface import InvalidRequestError, TensorForm
from torchembed.serving.models.description import ModelDescription

_MOST_JOINED_IDS = 1 << 16
"""The most ids of a request that are joined to be checked in one call: copying more of them takes
longer than a call for each lookup."""


class FeatureIds(NamedTuple):
    """The ids of a feature, sample by sample."""

    ids: np.ndarray
    """int64 ``[L]``."""
    lengths: np.ndarray
    """int64 ``[B]``."""
    weights: np.ndarray | None
    """float32 ``[L]``."""


class Request(NamedTuple):
    """A request whose arrays fit the model; its dense inputs and features by name."""

    num_samples: int
    dense: dict[str, np.ndarray]
    features: dict[str, FeatureIds]

    def part(self, first: int, last: int) -> "Request":
        """The samples from ``first`` to before ``last``, all of whose features are of fixed hotness
        and without weights; shares the arrays."""
        features = {}
        for name, (ids, lengths, _) in self.features.items():
            hotness = len(ids) // self.num_samples
            of_part = ids[first * hotness : last * hotness]
            features[name] = FeatureIds(of_part, lengths[first:last], None)
        dense = {name: array[first:last] for name, array in self.dense.items()}
        return Request(last - first, dense, features)


def check_request(description: ModelDescription, inputs: Mapping[str, np.ndarray]) -> Request:
    """The arrays of a request, checked.

    Raises:
        InvalidRequestError: for names, dtypes, shapes, lengths or ids that do not fit.
    """
    forms = description.input_forms
    if inputs.keys() != forms.keys():
        lacking, unknown = sorted(set(forms) - set(inputs)), sorted(set(inputs) - set(forms))
        raise InvalidRequestError(
            f"inputs must be {sorted(forms)}, got none of {lacking} and unknown ones {unknown}"
        )
    sizes, jagged = set[int](), description.jagged_inputs
    for name, form in forms.items():
        array = inputs[name]
        shape = array.shape
        # The first dim is of any size.
        if array.dtype != form.dtype or not shape or shape[1:] != form.shape[1:]:
            raise InvalidRequestError(_misfit(form, array))
        if name not in jagged:
            sizes.add(shape[0])
    if len(sizes) != 1:
        raise InvalidRequestError(
            f"inputs must all have one number of samples, got {sorted(sizes)}"
        )
    (num_samples,) = sizes
    if not num_samples:
        raise InvalidRequestError("inputs must have at least 1 sample, got none")
    features: dict[str, FeatureIds] = {}
    lengths: dict[int, np.ndarray] = {}
    for feature in description.features:
        features[feature.name] = _feature_ids(feature, inputs, num_samples, lengths)
    _check_ids(description, features)
    return Request(num_samples, {i.name: inputs[i.name] for i in description.inputs}, features)


def _check_ids(description: ModelDescription, features: Mapping[str, FeatureIds]) -> None:
    """Raise ``InvalidRequestError`` for ids that their table refuses."""
    num_ids = description.num_ids
    names = [name for name in num_ids if features[name].ids.size]
    # Few ids are joined, so that those of all features are looked at in one call.
    is_joined = sum(features[name].ids.size for name in names) <= _MOST_JOINED_IDS
    for some in [names] if names and is_joined else [[name] for name in names]:
        arrays = [features[name].ids for name in some]
        firsts = np.array([0, *itertools.accumulate(ids.size for ids in arrays[:-1])])
        every = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        # As unsigned numbers negative ones are the greatest.
        greatest = np.maximum.reduceat(every.view(np.uint64), firsts).tolist()
        for name, most in zip(some, greatest, strict=True):
            if most >= num_ids[name]:
                ids = features[name].ids
                bad = ids[(ids < 0) | (ids >= num_ids[name])][0]
                raise InvalidRequestError(
                    f"ids of feature {name} must be in [0, {num_ids[name]}), got {bad}"
                )


def _misfit(form: TensorForm, array: np.ndarray) -> str:
    if array.dtype != form.dtype:
        return f"input {form.name} must be of dtype {form.dtype}, got {array.dtype}"
    return f"input {form.name} must have shape {list(form.shape)}, got {list(array.shape)}"


def _feature_ids(
    feature: Feature,
    inputs: Mapping[str, np.ndarray],
    num_samples: int,
    same_lengths: dict[int, np.ndarray],
) -> FeatureIds:
    """The ids of a feature; ``same_lengths``, by hotness, is filled and shared by all features of
    a request."""
    ids = inputs[feature.name]
    weights = inputs[f"{feature.name}.weights"] if feature.is_weighted else None
    if weights is not None and weights.shape != ids.shape:
        raise InvalidRequestError(
            f"input {feature.name}.weights must have the shape of {feature.name} "
            f"{list(ids.shape)}, got {list(weights.shape)}"
        )
    if feature.hotness is not None:
        lengths = same_lengths.get(feature.hotness)
        if lengths is None:
            lengths = np.full(num_samples, feature.hotness, dtype=np.int64)
            same_lengths[feature.hotness] = lengths
    else:
        lengths = inputs[f"{feature.name}.lengths"].astype(np.int64)
        if (lengths < 0).any() or lengths.sum() != len(ids):
            raise InvalidRequestError(
                f"input {feature.name}.lengths must not be negative and must add up to the "
                f"{len(ids)} ids of {feature.name}, got a sum of {lengths.sum()}"
            )
    return FeatureIds(ids.reshape(-1), lengths, None if weights is None else weights.reshape(-1))


def joined(requests: Sequence[Request]) -> Request:
    """One request of the samples of several of one model, in their order."""
    if len(requests) == 1:
        return requests[0]
    first = requests[0]
    features = {}
    for name, of_first in first.features.items():
        parts = [request.features[name] for request in requests]
        weights = None
        if of_first.weights is not None:
            weights = np.concatenate([p.weights for p in parts if p.weights is not None])
        ids = np.concatenate([part.ids for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        features[name] = FeatureIds(ids, lengths, weights)
    dense = {name: np.concatenate([r.dense[name] for r in requests]) for name in first.dense}
    return Request(sum(r.num_samples for r in requests), dense, features)


def as_tensor(array: np.ndarray) -> Tensor:
    """``array`` as a tensor that may share its memory."""
    # Copied where it cannot be written, of which torch would warn.
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def lookup_features(
    description: ModelDescription, request: Request, lookups: Sequence[int]
) -> SparseFeatures:
    """The ids that a request looks up: a feature for each of ``lookups``, by its number."""
    ids, lengths, weights, hotness = [], [], [], []
    is_weighted = any(description.lookups[number].is_weighted for number in lookups)
    is_fixed = True
    for number in lookups:
        lookup = description.lookups[number]
        table = description.table(lookup.table)
        of_feature = request.features[lookup.feature]
        some, counts = of_feature.ids, of_feature.lengths
        factors = of_feature.weights if lookup.is_weighted else None
        if factors is None and is_weighted:
            factors = np.ones(len(some), dtype=np.float32)
        if table.num_ids is not None and table.bad_ids is BadIds.CLAMP:
            some = some.clip(0, table.num_ids - 1)
        known = description.feature(lookup.feature).hotness
        if lookup.padding_id is not None:
            is_kept = some != lookup.padding_id
            bags = np.repeat(np.arange(len(counts)), counts)
            some, counts = some[is_kept], np.bincount(bags[is_kept], minlength=len(counts))
            factors, known = None if factors is None else factors[is_kept], None
        is_fixed = is_fixed and known is not None
        ids.append(some)
        lengths.append(counts)
        hotness.append(known)
        weights.append(factors)
    keys = tuple(str(number) for number in lookups)
    values = as_tensor(np.concatenate(ids))
    factors = as_tensor(np.concatenate(weights)) if is_weighted else None
    if is_fixed:
        return SparseFeatures(
            keys=keys,
            values=values,
            batch_size=request.num_samples,
            hotness=tuple(hotness),
            weights=factors,
        )
    ends = as_tensor(np.concatenate([[0], np.concatenate(lengths).cumsum()]).astype(np.int64))
    return SparseFeatures(
        keys=keys, values=values, batch_size=request.num_samples, offsets=ends, weights=factors
    )
