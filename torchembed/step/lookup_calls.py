"""The calls by which a model's collections look up tensors of its batches."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.trees import Tree, map_tensors, tensors_in
from torchembed.modules.staged_collection import LookedUp, StagedCollection, is_same_batch
from torchembed.step.batch_layout import with_sparse_features


class LookupCall(NamedTuple):
    """One call of a collection in the model's forward, with features of the batch."""

    collection: StagedCollection
    features: SparseFeatures
    tensors: list[int]
    """For each tensor of ``features`` its number among the batch's."""

    def features_of(self, batch: Tree) -> SparseFeatures:
        """The features that the collection is called with for another batch of the layout."""
        of_batch, numbers = tensors_in(with_sparse_features(batch)), iter(self.tensors)
        return map_tensors(lambda _: of_batch[next(numbers)], self.features)

    def is_same(self, other: "LookupCall") -> bool:
        """True if both look up the same."""
        is_same = self.collection is other.collection
        return is_same and is_same_batch(self.features, other.features)


@contextlib.contextmanager
def observed_calls(model: nn.Module, batch: Tree) -> Iterator[list[LookupCall]]:
    """The calls of collections within it, once each, whose features are made of the tensors of
    ``batch`` themselves, whatever holds them."""
    tensors_of_batch = tensors_in(with_sparse_features(batch))
    # By identity: a copy or a view of a batch's tensor may hold anything in the next batch.
    places = {id(tensor): number for number, tensor in enumerate(tensors_of_batch)}
    calls: list[LookupCall] = []

    def note(collection: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(collection, StagedCollection)
        features = as_sparse_features(arguments[0])
        tensors = tensors_in(features)
        known = [places[id(tensor)] for tensor in tensors if id(tensor) in places]
        call = LookupCall(collection, features, known)
        if len(known) == len(tensors) and not any(map(call.is_same, calls)):
            calls.append(call)

    collections = [module for module in model.modules() if isinstance(module, StagedCollection)]
    hooks = [module.register_forward_pre_hook(note) for module in collections]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def reusing(calls: Sequence[LookupCall], looked_up: Sequence[LookedUp]) -> Iterator[None]:
    """Within it, the collections of ``calls`` use what was looked up ahead for each call."""
    by_collection: dict[StagedCollection, list[LookedUp]] = {}
    for call, of_call in zip(calls, looked_up, strict=True):
        by_collection.setdefault(call.collection, []).append(of_call)
    with contextlib.ExitStack() as stack:
        for collection, of_collection in by_collection.items():
            stack.enter_context(collection.reusing(of_collection))
        yield
