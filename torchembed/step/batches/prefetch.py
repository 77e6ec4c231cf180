"""The preparation of the next batch while this one is trained: all that its ids alone decide."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.trees import Tree, map_tensors, tensors_in
from torchembed.modules.lookup.bad_ids import deferred_id_checks
from torchembed.modules.lookup.lookup_stages import Admitted, Routed
from torchembed.step.bad_id_flag import BadIdFlag, either, reduce_checks
from torchembed.step.batches.batch_layout import (
    tensors_without_ids,
    with_capacity,
    without_ids,
)
from torchembed.step.batches.bucketized_buffers import BucketizedBuffers, Capacity
from torchembed.step.batches.input_buffers import InputBuffers
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.joined_calls import JoinedCall
from torchembed.step.lookup_calls import Call, LookupCall
from torchembed.step.stages import AdmittedBatch, BucketizedBatch
from torchembed.tables import Admission


class Prefetch:
    """Prepares the batch of each of two buffers, on memory that stays where it is.

    Args:
        example: a batch of their layout.
        program: what steps do.
        calls: all lookup calls of the model; needed where there is a ``capacity``.
        capacity: for jagged batches; None for fixed hotness.
        buffers: for batches of the layout; new ones by default.

    Attributes:
        buffers: where batches are copied to.
        bucketized: of jagged batches: each is to be bucketized in its buffer before it is prepared.
        batches: for each buffer, what the model is given, once it was prepared.
        calls: all lookup calls of the model; the first step finds them out.
        admitted: for each buffer, where there are calls.
    """

    def __init__(
        self,
        example: Tree,
        program: StepProgram,
        calls: Sequence[LookupCall] | None = None,
        capacity: Capacity | None = None,
        buffers: InputBuffers | None = None,
    ) -> None:
        self._capacity, self._group = capacity, program.group
        layout = example if capacity is None else with_capacity(example, capacity.num_ids)
        if buffers is None:
            tracks_fresh = program.epochs is not None
            buffers = InputBuffers(layout, program.device, tracks_fresh=tracks_fresh)
        self.buffers = buffers
        self._epochs = program.epochs
        self.bucketized: BucketizedBuffers | None = None
        self._numbers: Tensor | None = None
        """All numbers of the capacity but the buffers', int64 on the device."""
        if capacity is None:
            self.batches = [map_tensors(torch.empty_like, b) for b in self.buffers.batches]
        else:
            assert calls is not None
            numbers = torch.tensor(capacity.numbers, dtype=torch.int64)
            self._numbers = numbers.to(program.device)
            self.batches = [without_ids(example, batch) for batch in self.buffers.batches]
            self.bucketized = BucketizedBuffers(
                self.buffers, calls, program.device, len(capacity.numbers)
            )
        self.calls: list[Call] | None = None if calls is None else list(calls)
        self.admitted: list[AdmittedBatch | None] = [None, None]

    @property
    def is_complete(self) -> bool:
        """True if both buffers' batches were prepared as far as their ids allow."""
        return not self.calls or None not in self.admitted

    @property
    def has_fixed_shapes(self) -> bool:
        """True if the shapes of all that is prepared follow from the layout also on a CPU, which
        leaves out spare ids where it can."""
        sends_spare = any(isinstance(c, JoinedCall) and c.sends_spare_ids for c in self.calls or ())
        return self.bucketized is None and not sends_spare

    def has_prepared(self, buffer: int) -> bool:
        """True if nothing is left to prepare of what the buffer held last."""
        return not self.calls or self.admitted[buffer] is not None

    def drop_incomplete(self) -> None:
        """Forget what was prepared for some of the calls only."""
        num_calls = len(self.calls or ())
        self.admitted = [
            known if known is not None and len(known.lookups) == num_calls else None
            for known in self.admitted
        ]

    @torch.no_grad()
    def prepare(self, buffer: int, *, in_place: bool, admits: bool = True) -> None:
        """Take the batch over from its buffer, route its ids and admit its rows; collective.

        Args:
            in_place: write over what was found for the buffer's batch before, since a graph reads
                it where it is.
            admits: whether to route and admit, too; else that is still to be done.
        """
        if self.bucketized is not None and self.bucketized.batches[buffer] is None:
            return  # nothing has been copied there yet, on any rank
        source, batch = self.buffers.batches[buffer], self.batches[buffer]
        if self.bucketized is not None:
            source, batch = tensors_without_ids(source, batch)
        _copy_tree(source, batch)
        if not self.calls or not admits:
            return
        bucketized = self._bucketize(self.calls, buffer)
        # Reduced before rows are sorted: what backward sends comes after this collective.
        flag = reduce_checks(bucketized.checks, self._group)
        with deferred_id_checks() as checks:
            routed = self._route(self.calls, bucketized)
        flag = either(flag, reduce_checks(checks, self._group))
        admission = self._admission(buffer, bucketized, flag)
        lookups = self._admit(self.calls, routed, buffer, admission, in_place=in_place)
        known = self.admitted[buffer]
        if known is not None and in_place:
            found = lookups, flag, admission.epoch
            _copy_tree(found, (known.lookups, known.flag, known.epoch))
        else:  # in the first capture too: the second one reads what it writes
            all_checks = [*bucketized.checks, *checks]
            self.admitted[buffer] = AdmittedBatch(
                self.batches[buffer], lookups, flag, all_checks, epoch=admission.epoch
            )
        # Last, so that a batch whose preparation an exception ended is prepared again.
        if self.buffers.is_fresh is not None:
            self.buffers.is_fresh[buffer].zero_()

    def _bucketize(self, calls: Sequence[Call], buffer: int) -> BucketizedBatch:
        if self.bucketized is not None:
            found = self.bucketized.batches[buffer]
            assert found is not None
            return found
        batch = self.batches[buffer]
        with deferred_id_checks() as checks:
            lookups = [call.exchange_sizes(batch) for call in calls]
        return BucketizedBatch(batch, lookups, checks)

    def _route(self, calls: Sequence[Call], bucketized: BucketizedBatch) -> list[Routed]:
        capacities = [None] * len(calls) if self._capacity is None else self._capacity.per_call
        return [
            call.collection.route(of_call, capacity)
            for call, of_call, capacity in zip(calls, bucketized.lookups, capacities, strict=True)
        ]

    def _admit(
        self,
        calls: Sequence[Call],
        routed: Sequence[Routed],
        buffer: int,
        admission: Admission,
        *,
        in_place: bool,
    ) -> list[Admitted]:
        lookups: list[Admitted] = []
        for call, of_call in zip(calls, routed, strict=True):
            admitted = call.collection.admit(of_call, admission)
            if self._capacity is not None:
                assert isinstance(call, LookupCall)  # modules of one table take no spare ids
                rows = admitted.rows
                if not in_place:
                    # Nothing in the memory of bucketized ids, which the next batch takes.
                    rows = map_tensors(torch.clone, rows)
                features = call.features_of(self.batches[buffer])
                admitted = dataclasses.replace(admitted, features=features, rows=rows)
            lookups.append(admitted)
        return lookups

    def _admission(
        self, buffer: int, bucketized: BucketizedBatch, flag: BadIdFlag | None
    ) -> Admission:
        """The admission of the buffer's batch, which will be trained if it was copied there since
        the buffer was last admitted, has no bad id and fits the capacity; empty where no table
        asks. Collective where there is a capacity."""
        if self._epochs is None or self.buffers.is_fresh is None:
            return Admission()
        is_fresh = self.buffers.is_fresh[buffer]
        is_trained = is_fresh.clone() if flag is None else is_fresh & (flag.skip == 0)
        if bucketized.needed is not None:
            # One that does not fit is admitted by the steps with a larger capacity that train it.
            is_trained &= self._fits(bucketized.needed)
        return self._epochs.admission(is_trained)

    def _fits(self, needed: Tensor) -> Tensor:
        """bool ``[1]``: True where no rank needs more than the capacity; collective."""
        assert self._numbers is not None
        outgrown = (needed > self._numbers).any().float().reshape(1)
        if self._group is not None:
            dist.all_reduce(outgrown, dist.ReduceOp.MAX, group=self._group)
        return outgrown == 0


def _copy_tree(source: Tree, target: Tree) -> None:
    for new, old in zip(tensors_in(source), tensors_in(target), strict=True):
        if new is not old:
            old.copy_(new)
