"""Steps on batches whose lengths vary without bound, without a graph and without waiting for a GPU.

How many ids are exchanged, only the GPU knows at first. A thread of its own finds out for the
batches to come, and tells the other ranks through the CPU; the ids themselves are sent from the
step, at one point of it on every rank, since collectives on two communicators that come in
different orders may wait for each other for ever.
"""

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from torchembed.core.trees import Tree, tensors_in
from torchembed.modules.lookup.bad_ids import deferred_id_checks
from torchembed.modules.sharded.sharded_collection import ShardedCollection
from torchembed.modules.table_module import TableModule
from torchembed.step.bad_id_flag import reduce_checks
from torchembed.step.batches.batch_layout import is_on_gpu, to_device, with_sparse_features
from torchembed.step.batches.worker import Worker
from torchembed.step.engines.eager_engine import EagerEngine
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.look_up_batch import looked_up_batch
from torchembed.step.lookup_calls import LookupCall, observed_calls
from torchembed.step.stages import (
    AdmittedBatch,
    BucketizedBatch,
    LookedUpBatch,
    ReadBatch,
    TrainedBatch,
)
from torchembed.step.step_optimizers import Assumptions, StepOptimizers
from torchembed.step.streams import event_on, fork_and_join, named_range, on_stream, wait_for
from torchembed.tables import Admission

_CLOSE_SECONDS = 10.0
"""The time in which sizes under way reach all ranks; where it takes longer, one of them is gone."""


@dataclasses.dataclass
class _Prefetched:
    """A batch on its way to its step."""

    source: Tree
    """Held, since it may still be copied from."""
    bucketized: "Future[BucketizedBatch | None]"
    """None where the ranks' batches are of different kinds."""
    admitted: AdmittedBatch | None = None


class JaggedEngine:
    """Trains batches of one layout but for the lengths of bags.

    The first step finds out which collections look up which of a batch's tensors; for batches after
    it sizes are exchanged ahead, in their order.
    """

    is_captured = False

    def __init__(self, program: StepProgram) -> None:
        self._program, self._eager = program, EagerEngine(program)
        self._epochs = program.epochs
        self._assumptions: Assumptions | None = None
        self.calls: list[LookupCall] = []
        """Once the first step has observed them; the model may have other lookups."""
        self._worker: Worker | None = None
        self._prefetched: dict[int, _Prefetched] = {}
        self._stream = self._ids_stream = None
        if program.is_cuda:
            self._stream = torch.cuda.Stream(program.device, priority=-1)
            # Without priority: the next batch's ids have the whole step's time.
            self._ids_stream = torch.cuda.Stream(program.device)

    @property
    def has_observed(self) -> bool:
        """True if the first step has shown the lookup calls."""
        return self._assumptions is not None

    @property
    def is_stale(self) -> bool:
        return self._assumptions is not None and self._assumptions.are_stale

    @property
    def can_be_padded(self) -> bool:
        """True if all that looks ids up are collections, which are called with the batch's own
        features, and ranks agree on the room for a vector for each id."""
        called = {call.collection.whole for call in self.calls}
        modules = self._program.model.modules()
        tables = [module for module in modules if isinstance(module, TableModule)]
        is_alone = self._program.group is None
        return (
            bool(called)
            and all(module in called for module in tables)
            and all(c.is_pooled or is_alone or isinstance(c, ShardedCollection) for c in called)
        )

    @property
    def worker(self) -> Worker:
        """The thread that may wait for sizes."""
        if self._worker is None:
            self._worker = Worker("torchembed: sizes of batches to come")
        return self._worker

    def release(self) -> None:
        if self._worker is not None:
            self._worker.close(_CLOSE_SECONDS)
            self._worker = None
        self._prefetched.clear()
        self._assumptions, self.calls = None, []

    def prefetch(self, batch: ReadBatch) -> None:
        """Have the thread copy the batch to the device and exchange sizes, where all ranks' are
        jagged."""
        if not self.has_observed or batch.number in self._prefetched:
            return
        given = event_on(torch.cuda.current_stream()) if is_on_gpu(batch.data) else None
        task = functools.partial(
            _bucketize, self.calls, batch, given, self._program.device, self._ids_stream
        )
        self._prefetched[batch.number] = _Prefetched(batch.data, self.worker.submit(task))

    def has_prepared(self, now: ReadBatch) -> bool:
        prefetched = self._prefetched.get(now.number)
        return prefetched is not None and prefetched.admitted is not None

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch:
        """Train ``now``, and send the ids of the first of those that are ``upcoming``.

        Raises:
            IndexError, ValueError, TypeError: as the model's forward would; for the next batch too,
                where other ranks wait for its ids.
        """
        if not self.has_observed:
            return self._observe(now)
        for batch in (now, *upcoming):
            if batch.kinds.jagged:
                self.prefetch(batch)
        prefetched = self._prefetched[now.number]
        # Batches before it were read of a source that the pipeline has left.
        self._prefetched = {n: of for n, of in self._prefetched.items() if n > now.number}
        with fork_and_join(self._stream), named_range("torchembed: step"):
            admitted = self._admitted(prefetched)
            with named_range("torchembed: look up"):
                looked_up = self._look_up(admitted)
            # The one point at which ids are sent: after this step's vectors, which they do not
            # delay, and concurrently with its dense part.
            following = self._following(upcoming)
            if following is not None:
                if self._program.fetches_rows and self._ids_stream is not None:
                    self._ids_stream.wait_stream(torch.cuda.current_stream())
                with named_range("torchembed: prepare"):
                    self._admitted(following)
            trained = self._eager.train(looked_up, prefetched)
        if self._stream is not None:
            # The caller gets the batch, which lives in the memory of another stream.
            for tensor in tensors_in(with_sparse_features(admitted.data)):
                tensor.record_stream(torch.cuda.current_stream())
        return trained

    def _observe(self, now: ReadBatch) -> TrainedBatch:
        """Train the first batch as it is."""
        optimizers = StepOptimizers(self._program.optimizers)
        assumptions = Assumptions(self._program.trained, optimizers, self._program.device)
        with fork_and_join(self._stream):
            batch = to_device(now.data, self._program.device)
            with observed_calls(self._program.model, batch) as calls:
                trained = self._eager.train(LookedUpBatch(batch), now.data)
        # Only now: a step that failed has not shown all calls.
        self.calls, self._assumptions = calls, assumptions
        return trained

    def _following(self, upcoming: Sequence[ReadBatch]) -> _Prefetched | None:
        batch = next((batch for batch in upcoming[:1] if batch.agree().kinds.jagged), None)
        if batch is None:
            return None
        following = self._prefetched[batch.number]
        if self._program.group is None and following.bucketized.exception() is not None:
            return None  # nobody waits for its ids, and its own step raises
        return following

    def _admitted(self, prefetched: _Prefetched) -> AdmittedBatch:
        """Send the ids of a batch and find their rows, where that was not done before."""
        if prefetched.admitted is None:
            bucketized = prefetched.bucketized.result()
            assert bucketized is not None
            prefetched.admitted = self._admit(bucketized)
        return prefetched.admitted

    def _admit(self, bucketized: BucketizedBatch) -> AdmittedBatch:
        pairs = list(zip(self.calls, bucketized.lookups, strict=True))
        with on_stream(self._ids_stream), torch.no_grad():
            wait_for(bucketized.ready)
            with deferred_id_checks() as more:
                routed = [call.collection.route(of_call) for call, of_call in pairs]
            checks = [*bucketized.checks, *more]
            # Known before rows are admitted, so that a table inserts no row for a batch that is not
            # trained.
            flag = reduce_checks(checks, self._program.group)
            admission = Admission()
            if self._epochs is not None:
                admission = self._epochs.admission(None if flag is None else flag.skip == 0)
            admitted = [
                call.collection.admit(of_call, admission)
                for call, of_call in zip(self.calls, routed, strict=True)
            ]
            ready = event_on(self._ids_stream)
            return AdmittedBatch(bucketized.data, admitted, flag, checks, ready, admission.epoch)

    def _look_up(self, admitted: AdmittedBatch) -> LookedUpBatch:
        wait_for(admitted.ready)
        return looked_up_batch(self.calls, admitted, self._program.group)


def _bucketize(
    calls: Sequence[LookupCall],
    batch: ReadBatch,
    given: torch.cuda.Event | None,
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> BucketizedBatch | None:
    """Copy a batch to the device and exchange the sizes of its ids; runs in the worker thread.

    Args:
        batch: readable once ``given`` is recorded.

    Returns:
        None where the ranks' batches are of different kinds.
    """
    if not batch.agree().kinds.jagged:
        return None
    # On the stream of ids: the wait for sizes is then one for this work alone, and not for the
    # step.
    with on_stream(stream), deferred_id_checks() as checks:
        wait_for(given)
        data = to_device(batch.data, device)
        lookups = [call.collection.exchange_sizes(call.features_of(data)) for call in calls]
        return BucketizedBatch(data, lookups, checks, event_on(stream))
