"""Joined lookups of eager steps: calls of modules of one table, looked up together as the step
before them has shown."""

import collections
import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.core import ranks
from torchembed.core.trees import Tree, layout_of, tensors_in
from torchembed.modules.calls_ahead import ModuleOfOneTable
from torchembed.modules.lookup.bad_ids import IdCheck, IdChecks
from torchembed.modules.lookup.lookup_stages import Bucketized
from torchembed.step.bad_id_flag import either, reduce_checks
from torchembed.step.batches.batch_layout import with_sparse_features
from torchembed.step.joined_calls import JoinedCall, observed_joined_calls
from torchembed.step.stages import LookedUpBatch
from torchembed.tables import Admission

_NUM_LAYOUTS = 8
"""The most layouts of batches that are remembered, the newest."""
_NOTHING, _OBSERVE = 0, 1
"""Choices of a rank for a batch besides using the calls of an earlier one, which have the numbers
after these."""


class EagerLookups:
    """Looks up ahead of forward, in as few lookups as may be, what the model's modules of one table
    are called with.

    The second batch of a layout shows the calls, and batches after it are looked up so. A call that
    the model makes in another way is looked up when it is made.

    Args:
        model: its modules are those that it has now.
        group: the ranks that train it; None for one.
        id_checks: makes a context that collects the checks of lookups, or in which they raise.

    Attributes:
        can_join: True where there are modules that may be looked up together.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, id_checks: IdChecks
    ) -> None:
        self._model, self._group, self._id_checks = model, group, id_checks
        modules = [module for module in model.modules() if isinstance(module, ModuleOfOneTable)]
        self._is_shared = any(module.is_on_several_ranks for module in modules)
        self._changes_tables = any(module.admission_changes_tables for module in modules)
        # What ranks share they join once all processes have agreed.
        may_join = group is None or (self._is_shared and not ranks.is_of_some(group))
        self.can_join = len(modules) > 1 and may_join
        self._known: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
        """For each layout the number of its calls, or that they are to be observed."""
        self._calls: dict[int, list[JoinedCall]] = {}
        """The calls by the number of what was observed, which is the same on all ranks."""
        self._num_observed = 0

    def release(self) -> None:
        """Forget all calls: the model may have changed."""
        self._known.clear()
        self._calls.clear()

    @contextlib.contextmanager
    def around_step(self, batch: Tree) -> Iterator[LookedUpBatch]:
        """``batch``, which is on the device, with what was looked up of it; trained within, where
        modules :attr:`can_join`."""
        layout = _layout_in_memory(batch)
        choice, bucketized = self._known.get(layout, _NOTHING), list[Bucketized]()
        if choice > _OBSERVE:
            with self._id_checks() as checks:
                found = self._bucketized(choice, batch)
            choice, bucketized = (_OBSERVE, []) if found is None else (choice, found)
        else:
            checks = []
        agreed = self._agreed(choice)
        if agreed > _OBSERVE:
            yield self._looked_up(batch, self._calls[agreed], bucketized, checks)
        elif agreed == _OBSERVE:
            with observed_joined_calls(self._model, batch) as calls:
                yield LookedUpBatch(batch)
            self._note(layout, calls)
        else:
            yield LookedUpBatch(batch)
            if layout is not None and layout not in self._known:
                self._remember(layout, _OBSERVE)

    def _agreed(self, choice: int) -> int:
        """``choice`` where all ranks that share tables of modules have made it, else what all of
        them can do. Collective where there are such."""
        if not self._is_shared:
            return choice
        least, negated = ranks.start_minimum(choice, -choice)()
        return choice if least == -negated else min(_OBSERVE, least)

    def _bucketized(self, number: int, batch: Tree) -> list[Bucketized] | None:
        """The ids of ``batch`` that the calls of ``number`` look up; None where they are out of
        date, or where forward should say what is wrong with the batch."""
        calls = self._calls.get(number)
        if calls is None or not all(call.is_current for call in calls):
            return None
        try:
            with torch.no_grad():
                return [call.exchange_sizes(batch) for call in calls]
        except (IndexError, TypeError, ValueError):
            return None

    def _looked_up(
        self,
        batch: Tree,
        calls: Sequence[JoinedCall],
        bucketized: Sequence[Bucketized],
        checks: list[IdCheck],
    ) -> LookedUpBatch:
        with self._id_checks() as of_routes:
            routed = [
                call.collection.route(of_call)
                for call, of_call in zip(calls, bucketized, strict=True)
            ]
        checks = [*checks, *of_routes]
        flag = reduce_checks(checks, self._group)
        # A table inserts no row for a batch that is not trained.
        admission = Admission(None if flag is None else flag.skip == 0)
        with self._id_checks() as of_fetches:
            lookups = [
                call.collection.look_up(call.collection.admit(of_call, admission))
                for call, of_call in zip(calls, routed, strict=True)
            ]
        flag = either(flag, reduce_checks(of_fetches, self._group))
        return LookedUpBatch(batch, calls, lookups, flag, [*checks, *of_fetches])

    def _note(self, layout: Hashable, calls: Sequence[JoinedCall]) -> None:
        """Remember the ``calls`` of a batch of ``layout``: those of several modules, or all, so
        that their ids are checked before a table inserts any."""
        self._num_observed += 1
        number = _OBSERVE + self._num_observed
        least = 1 if self._changes_tables else 2
        self._calls[number] = [call for call in calls if len(call.modules) >= least]
        if layout is not None:
            self._remember(layout, number)

    def _remember(self, layout: Hashable, number: int) -> None:
        self._calls.pop(self._known.pop(layout, _NOTHING), None)
        self._known[layout] = number
        if len(self._known) > _NUM_LAYOUTS:
            _, oldest = self._known.popitem(last=False)
            self._calls.pop(oldest, None)


def _layout_in_memory(batch: Tree) -> Hashable:
    """A key that is equal for batches whose tensors lie in memory in the same way; None where one
    of them shares its memory with other elements."""
    layout = layout_of(batch)
    if layout is None:
        return None
    tensors: list[Tensor] = tensors_in(with_sparse_features(batch))
    if any(t.untyped_storage().nbytes() != t.numel() * t.element_size() for t in tensors):
        return None
    return layout, tuple(tensor.stride() for tensor in tensors)
