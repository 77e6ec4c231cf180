"""Which collections of a model look up which tensors of its batches."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchembed.core.features import SparseFeatures, as_sparse_features
from torchembed.core.trees import map_tensors, tensors_in
from torchembed.modules.preparing import Prepared, PreparingModule, is_same_batch
from torchembed.step.batch_layout import with_sparse_features


class CollectionCall(NamedTuple):
    """A collection's use of a batch."""

    collection: PreparingModule
    features: SparseFeatures
    tensors: list[int]
    """For each tensor of ``features`` its number among the batch's."""

    def features_of(self, batch: Any) -> SparseFeatures:
        """What the collection is called with for another batch of the layout."""
        of_batch, numbers = tensors_in(with_sparse_features(batch)), iter(self.tensors)
        return map_tensors(lambda _: of_batch[next(numbers)], self.features)

    def is_same(self, other: "CollectionCall") -> bool:
        """Whether both look up the same."""
        is_same = self.collection is other.collection
        return is_same and is_same_batch(self.features, other.features)


@contextlib.contextmanager
def observed_calls(model: nn.Module, batch: Any) -> Iterator[list[CollectionCall]]:
    """The calls of collections of ``model`` meanwhile, once each, with features whose tensors are
    those of ``batch`` themselves, whatever holds them."""
    tensors_of_batch = tensors_in(with_sparse_features(batch))
    places = {id(tensor): number for number, tensor in enumerate(tensors_of_batch)}
    calls: list[CollectionCall] = []

    def note(collection: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(collection, PreparingModule)
        features = as_sparse_features(arguments[0])
        tensors = tensors_in(features)
        known = [places[id(tensor)] for tensor in tensors if id(tensor) in places]
        call = CollectionCall(collection, features, known)
        if len(known) == len(tensors) and not any(map(call.is_same, calls)):
            calls.append(call)

    collections = [module for module in model.modules() if isinstance(module, PreparingModule)]
    hooks = [module.register_forward_pre_hook(note) for module in collections]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def handing_over(calls: Sequence[CollectionCall], prepared: Sequence[Prepared]) -> Iterator[None]:
    """Meanwhile the collections of ``calls`` use what was ``prepared`` of each."""
    by_collection: dict[PreparingModule, list[Prepared]] = {}
    for call, of_call in zip(calls, prepared, strict=True):
        by_collection.setdefault(call.collection, []).append(of_call)
    with contextlib.ExitStack() as stack:
        for collection, of_collection in by_collection.items():
            stack.enter_context(collection.handing_over(of_collection))
        yield
