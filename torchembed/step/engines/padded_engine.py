"""Captured steps on jagged batches, in memory with a capacity for more ids than each batch has.

How many ids of a batch go from one rank to another, only the GPU knows at first. A thread of its
own finds out for the batches to come, over all ranks and through the CPU. The step before does not
wait for that: it prepares the batch within the capacity, and where that turns out to be too small
the batch is prepared again in steps with a larger one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from torchembed.core.host_numbers import HostNumbers
from torchembed.core.trees import Tree
from torchembed.step.batches.batch_layout import (
    dense_tensors,
    is_on_gpu,
    to_device,
    with_dense_tensors,
    with_sparse_features,
)
from torchembed.step.batches.bucketized_buffers import Capacity, bucketize
from torchembed.step.batches.counted_parts import with_headroom
from torchembed.step.engines.collective_capture import failure_on_any_rank
from torchembed.step.engines.jagged_engine import JaggedEngine
from torchembed.step.engines.static_step import StaticStep
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.lookup_calls import LookupCall
from torchembed.step.stages import ReadBatch, Reason, TrainedBatch
from torchembed.step.step_optimizers import StepOptimizers
from torchembed.step.streams import event_on, named_range, on_stream, wait_for
from torchembed.step.watches.spare_places import difference_of_spare_places
from torchembed.step.watches.watched_values import NotCapturable


@dataclasses.dataclass(frozen=True)
class _Prefetched:
    """A batch that the thread brings to its buffer."""

    is_bucketized: "Future[bool]"
    """Result: True if the batch is in its buffer and its ids are bucketized; False where it is not
    of this kind on every rank, or exceeds the capacity."""
    needs: "Future[list[int] | None]"
    """Result: :attr:`Capacity.numbers` that the batch needs; None where it is not in its buffer."""


class PaddedEngine:
    """Static steps on batches that differ in the lengths of bags.

    The model is given its ids on the meta device, so that one that computes with them, of which
    there are spare ones, fails instead; offsets of ``SparseFeatures`` are the batch's. Where it
    looks up a vector for each id, zeros are behind the vectors of a feature's bags, and it is
    compared with itself without these.

    Args:
        program: what a step does.
        observer: has observed all lookup calls of the model; its thread may wait for sizes.
        wait_for_steps: waits until the device has done all steps so far.
    """

    def __init__(
        self, program: StepProgram, observer: JaggedEngine, wait_for_steps: Callable[[], None]
    ) -> None:
        self._program, self._observer = program, observer
        self._calls = observer.calls
        self._wait_for_steps = wait_for_steps
        self._stream = torch.cuda.Stream(program.device) if program.is_cuda else None
        self._capacity = Capacity(num_ids=0, per_call=())
        self._step: StaticStep | None = None
        self._prefetched: dict[int, _Prefetched] = {}
        self._has_trained = False
        """True if the model has trained in such a step."""
        self._is_compared = False
        """True if the model computes the same where vectors have spare places, or sees none."""

    @property
    def capacity(self) -> Capacity:
        """The number of ids that steps can take now."""
        return self._capacity

    @property
    def is_stale(self) -> bool:
        if self._step is None:
            return self._observer.is_stale
        return self._step.is_stale

    @property
    def is_captured(self) -> bool:
        return self._step is not None and self._step.is_captured

    def release(self) -> None:
        self._prefetched.clear()
        if self._step is not None:
            self._step.release()
            self._step = None

    def prefetch(self, batch: ReadBatch) -> None:
        """Have the thread bring the batch to its buffer, where the capacity allows, and find out
        what it needs."""
        if self._step is None or batch.number in self._prefetched:
            return
        step, num_ids = self._step, self._capacity.num_ids
        given = event_on(torch.cuda.current_stream()) if is_on_gpu(batch.data) else None
        worker = self._observer.worker
        self._prefetched[batch.number] = _Prefetched(
            # Two tasks: the step needs the first one's launches only, and the second one waits for
            # the device and for the other ranks.
            worker.submit(functools.partial(_bucketize, step, batch, num_ids, given, self._stream)),
            worker.submit(functools.partial(_needs, step, self._calls, batch, num_ids)),
        )

    def has_prepared(self, now: ReadBatch) -> bool:
        return self._step is not None and self._step.has_prepared(now)

    def run(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> TrainedBatch | Reason:
        """Train ``now``, and prepare the first of those that are ``upcoming``.

        Raises:
            IndexError, ValueError, TypeError: if the batch cannot be looked up.
            RuntimeError: if the first such step failed on a rank and has changed the model.
        """
        if not self._fits(now):
            self._wait_for_steps()
            self._enlarge(now, upcoming)
        step = self._step
        assert step is not None
        following = upcoming[0] if upcoming else None
        if following is None:
            for prefetched in self._prefetched.values():
                # Until its copy was begun, the step cannot hold a batch back.
                prefetched.is_bucketized.exception()
        if following is not None and not self._is_bucketized(step, following):
            following = None
        trained: list[TrainedBatch] = []

        def train() -> Reason | None:
            failure = step.make_ready(now)
            if failure is None:
                trained.append(step.run(now, following))
            return failure

        if not self._is_compared:
            compare = functools.partial(self._compare, step, now)
            failure = failure_on_any_rank(compare, self._program.host_state)
            if failure is not None:
                return failure
            self._is_compared = True
        with named_range("torchembed: step"):
            # The first step may fail on a rank, as where the model computes with ids. All ranks
            # hear of it, and go on by another engine unless weights have changed.
            if self._has_trained:
                failure = train()
            else:
                failure = failure_on_any_rank(train, self._program.host_state)
                self._has_trained = failure is None
                if failure is not None and step.has_begun_update:
                    raise RuntimeError(
                        "a train step failed, on this rank or another one, when it had begun to "
                        "change the model; the warning before says why; go on from a checkpoint"
                    )
        self._prefetched = {n: of for n, of in self._prefetched.items() if n > now.number}
        if failure is not None:
            return failure
        (outcome,) = trained
        # Sparse features are returned as they were given: the step's own have spare ids.
        batch = with_dense_tensors(now.data, dense_tensors(outcome.result.batch))
        return dataclasses.replace(outcome, result=outcome.result._replace(batch=batch))

    def _compare(self, step: StaticStep, now: ReadBatch) -> None:
        """Compare what the model computes of ``now`` with what it computes without spare places.

        Raises:
            NotCapturable: where that is something else.
        """
        step.make_ready(now)
        device = self._program.device
        difference = difference_of_spare_places(
            self._program,
            StepOptimizers(self._program.optimizers),
            to_device(now.data, device) if now.padded is None else now.padded.filled(device),
            step.lookup(now.buffer),
        )
        if difference is not None:
            raise NotCapturable(Reason(difference))

    def _fits(self, batch: ReadBatch) -> bool:
        """True if steps can take the batch, the same on all ranks; waits until that is known."""
        prefetched = self._prefetched.get(batch.number)
        if prefetched is None:
            return False
        prefetched.is_bucketized.result()
        needs = prefetched.needs.result()
        if needs is None:
            return False
        pairs = zip(needs, self._capacity.numbers, strict=True)
        return all(needed <= there for needed, there in pairs)

    def _enlarge(self, now: ReadBatch, upcoming: Sequence[ReadBatch]) -> None:
        """Make steps with a capacity for ``now``, and prefetch it and those ``upcoming`` again.

        Waits for the GPU. Every rank does it before the same step, when those before are done.
        """
        device = self._program.device
        task = functools.partial(_measure, self._calls, now.data, device, self._stream)
        # In the thread, whose collectives then stay in one order on all ranks.
        before, needs = self._capacity, self._observer.worker.submit(task).result()
        known = before.per_call or tuple((0,) * len(of_call) for of_call in needs)
        self._capacity = Capacity(
            with_headroom(now.agree().num_ids, before.num_ids),
            tuple(
                tuple(map(with_headroom, *of_call)) for of_call in zip(needs, known, strict=True)
            ),
        )
        self.release()
        self._step = StaticStep(self._program, now.form, self._calls, self._capacity)
        # More places than ever, so the model is compared again.
        self._is_compared = all(call.collection.is_pooled for call in self._calls)
        for batch in (now, *upcoming):
            if batch.kinds.jagged:
                self.prefetch(batch)
        fits = self._fits(now)
        assert fits

    def _is_bucketized(self, step: StaticStep, following: ReadBatch) -> bool:
        """True if the step can prepare the batch; then the current stream waits until it can."""
        prefetched = self._prefetched.get(following.number)
        if prefetched is None or prefetched.is_bucketized.exception() is not None:
            return False
        if not prefetched.is_bucketized.result():
            return False
        if not step.is_captured:
            # A capture bucketizes anew, which the thread may not do at the same time.
            prefetched.needs.exception()
        assert step.bucketized is not None
        step.bucketized.wait_until_bucketized(following.buffer)
        return True


def _bucketize(
    step: StaticStep,
    batch: ReadBatch,
    num_ids: int,
    given: torch.cuda.Event | None,
    stream: torch.cuda.Stream | None,
) -> bool:
    """Copy a batch, which is there once ``given`` is recorded, to its buffer and sort its ids.

    Returns:
        False where some rank's batch is no batch for these steps, or has more than ``num_ids`` ids:
        on all ranks, since preparing it is collective.
    """
    if not _fits_buffer(batch, num_ids):
        return False
    with on_stream(stream):
        wait_for(given)
        step.buffers.fill(dataclasses.replace(batch, data=with_sparse_features(batch.data)))
        assert step.bucketized is not None
        step.bucketized.bucketize(batch.buffer)
    return True


def _needs(
    step: StaticStep, calls: Sequence[LookupCall], batch: ReadBatch, num_ids: int
) -> list[int] | None:
    """The numbers that a batch in its buffer needs; None where it is not there."""
    if not _fits_buffer(batch, num_ids):
        return None
    assert step.bucketized is not None
    needed, capacity = step.bucketized.needed(batch.buffer), step.capacity
    assert capacity is not None
    agreed = _agreed(calls, needed, [len(of_call) for of_call in capacity.per_call])
    return [number for of_call in agreed for number in of_call]


def _fits_buffer(batch: ReadBatch, num_ids: int) -> bool:
    """True if buffers for ``num_ids`` can take every rank's batch; waits for the ranks to read."""
    agreement = batch.agree()
    return agreement.kinds.jagged and agreement.num_ids <= num_ids


def _measure(
    calls: Sequence[LookupCall],
    source: Tree,
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> list[list[int]]:
    """The capacity that a batch in memory of its own needs for each call."""
    with on_stream(stream):
        found = bucketize(calls, to_device(source, device), device)
        assert found.needed is not None
        return _agreed(calls, HostNumbers(found.needed).tolist(), found.num_needed)


def _agreed(
    calls: Sequence[LookupCall], needed: Sequence[int], num_needed: Sequence[int]
) -> list[list[int]]:
    """The capacities of each call: the most that a rank needs, given by the next ``num_needed`` of
    the numbers ``needed``."""
    numbers = iter(needed)
    return [
        call.collection.agreed_capacity(list(itertools.islice(numbers, count)))
        for call, count in zip(calls, num_needed, strict=True)
    ]
