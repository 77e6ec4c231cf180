"""The calls by which a model's collections look up tensors of its batches."""

import contextlib
import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from torchembed.core.features import SparseFeatures
from torchembed.core.trees import Tree, map_tensors, tensors_in
from torchembed.modules.lookup.forward_admission import admitted_ahead
from torchembed.modules.lookup.lookup_stages import Admitted, Bucketized, LookedUp
from torchembed.modules.staged_collection import StagedCollection, is_same_batch
from torchembed.step.batches.batch_layout import with_sparse_features
from torchembed.step.joined_calls import JoinedCall, answered, observed_joined_calls


class LookupCall(NamedTuple):
    """One call of a collection in the model's forward, with features of the batch."""

    collection: StagedCollection
    features: SparseFeatures
    tensors: list[int]
    """For each tensor of ``features`` its number among the batch's."""
    turns: list[int]
    """Positions among all calls of a forward; several where the model repeats the call."""

    def features_of(self, batch: Tree) -> SparseFeatures:
        """The features that the collection is called with for another batch of the layout."""
        of_batch, numbers = tensors_in(with_sparse_features(batch)), iter(self.tensors)
        return map_tensors(lambda _: of_batch[next(numbers)], self.features)

    def exchange_sizes(self, batch: Tree) -> Bucketized:
        """The collection's stage of that name, for another batch of the layout."""
        return self.collection.exchange_sizes(self.features_of(batch))

    def is_same(self, other: "LookupCall") -> bool:
        """True if both look up the same."""
        is_same = self.collection is other.collection
        return is_same and is_same_batch(self.features, other.features)


Call: TypeAlias = LookupCall | JoinedCall
"""A lookup that is done ahead of the model's forward."""


@contextlib.contextmanager
def observed_fixed_calls(model: nn.Module, batch: Tree) -> Iterator[list[Call]]:
    """:func:`observed_calls` for batches of one layout, whose views are the same parts of each, and
    once it has ended also the joined calls of modules of one table."""
    calls: list[Call] = []
    with observed_calls(model, batch, calls), observed_joined_calls(model, batch) as joined:
        yield calls
    calls += joined


@contextlib.contextmanager
def observed_calls(
    model: nn.Module, batch: Tree, into: "list[Any] | None" = None
) -> Iterator[list[LookupCall]]:
    """The calls of collections in forwards within it, once each, whose features are made of the
    tensors of ``batch`` themselves, whatever holds them."""
    tensors_of_batch = tensors_in(with_sparse_features(batch))
    # By identity: a copy or a view of a batch's tensor may hold anything in the next batch.
    places = {id(tensor): number for number, tensor in enumerate(tensors_of_batch)}
    calls: list[LookupCall] = [] if into is None else into
    turns = itertools.count()

    def note(collection: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(collection, StagedCollection)
        if torch._C._current_graph_task_id() != -1:
            return  # of a backward, which computes a part of forward again
        for of_part, features in collection.divided(arguments[0]):
            note_lookup(of_part, features)

    def note_lookup(collection: StagedCollection, features: SparseFeatures) -> None:
        tensors = tensors_in(features)
        known = [places[id(tensor)] for tensor in tensors if id(tensor) in places]
        if len(known) < len(tensors):
            return
        call = LookupCall(collection, features, known, [next(turns)])
        same = next(filter(call.is_same, calls), None)
        if same is None:
            calls.append(call)
        else:
            same.turns.extend(call.turns)

    collections = [module for module in model.modules() if isinstance(module, StagedCollection)]
    hooks = [module.register_forward_pre_hook(note) for module in collections]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def looked_up_in_turns(
    calls: Sequence[Call], admitted: Sequence[Admitted]
) -> tuple[list[Call], list[LookedUp]]:
    """Look up what was admitted of a batch for each of ``calls``, in the order of forward.

    A call that the model repeats is looked up as often. Gradients of rows are added up in the order
    of a model that looks nothing up ahead then.

    Returns:
        A call for each lookup, and the lookups.
    """
    ordered: list[tuple[int, Call, Admitted]] = []
    for call, of_call in zip(calls, admitted, strict=True):
        turns = call.turns if isinstance(call, LookupCall) else [sys.maxsize]
        ordered += [(turn, call, of_call) for turn in turns]
    ordered.sort(key=operator.itemgetter(0))
    lookups = [call.collection.look_up(of_call) for _, call, of_call in ordered]
    return [call for _, call, _ in ordered], lookups


@contextlib.contextmanager
def reusing(calls: Sequence[Call], looked_up: Sequence[LookedUp], batch: Tree) -> Iterator[None]:
    """Within it, modules use what was looked up ahead for each of ``calls`` with ``batch``."""
    by_collection: dict[StagedCollection, list[LookedUp]] = {}
    joined: list[tuple[JoinedCall, LookedUp]] = []
    for call, of_call in zip(calls, looked_up, strict=True):
        if isinstance(call, JoinedCall):
            joined.append((call, of_call))
        else:
            by_collection.setdefault(call.collection, []).append(of_call)
    holders = [*by_collection, *(module for call, _ in joined for module in call.modules)]
    groups = {group for holder in holders for group in holder.table_set.current_groups()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(admitted_ahead(groups))
        for collection, of_collection in by_collection.items():
            stack.enter_context(collection.reusing(of_collection))
        stack.enter_context(answered([c for c, _ in joined], [found for _, found in joined], batch))
        yield
