"""Batches of varying lengths in input buffers, their ids sorted by destination before any is sent.

What that needs to know of the other ranks, how many ids each sends at most, is found here too, and
how many ids features have for which a vector each is looked up.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchembed.core.trees import Tree
from torchembed.modules.lookup.bad_ids import deferred_id_checks
from torchembed.step.batches.input_buffers import InputBuffers
from torchembed.step.graph_capture import captured_graph
from torchembed.step.lookup_calls import LookupCall
from torchembed.step.stages import BucketizedBatch
from torchembed.step.streams import wait_for


class Capacity(NamedTuple):
    """Numbers of ids that padded steps can take."""

    num_ids: int
    """The most ids of one ``SparseFeatures`` of a batch."""
    per_call: tuple[tuple[int, ...], ...]
    """For each lookup call of the model, the numbers that its collection's ``route`` takes."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all lookup calls, one after the other."""
        return tuple(number for of_call in self.per_call for number in of_call)


def bucketize(calls: Sequence[LookupCall], batch: Tree, device: torch.device) -> BucketizedBatch:
    """Sort the ids of a batch on ``device`` by their rank, without waiting for it."""
    with torch.no_grad(), deferred_id_checks() as checks:
        lookups = [call.collection.bucketize(call.features_of(batch)) for call in calls]
        none = torch.zeros(0, dtype=torch.int64, device=device)
        of_calls = [
            call.collection.needed_capacity(bucketized)
            for call, bucketized in zip(calls, lookups, strict=True)
        ]
        needed = [none if numbers is None else numbers.long() for numbers in of_calls]
        num_needed = tuple(numbers.numel() for numbers in needed)
        return BucketizedBatch(
            batch, lookups, checks, needed=torch.cat([none, *needed]), num_needed=num_needed
        )


class BucketizedBuffers:
    """The bucketized batch of each of two input buffers, in memory that the buffer's next batch
    then takes; bucketized by CUDA graphs once they are captured.

    Args:
        buffers: where batches are copied to.
        calls: all lookup calls of the model.
        device: of the buffers.
        num_needed: how many numbers a :class:`Capacity` holds for all calls.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        calls: Sequence[LookupCall],
        device: torch.device,
        num_needed: int,
    ) -> None:
        self._buffers, self._calls, self._device = buffers, calls, device
        self.batches: list[BucketizedBatch | None] = [None, None]
        self._graphs: list[torch.cuda.CUDAGraph | None] = [None, None]
        is_cuda = device.type == "cuda"
        self._needed = [
            torch.zeros(num_needed, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)
        ]
        # An event that blocks leaves the processor to the thread that launches steps.
        self._done = [torch.cuda.Event(blocking=True) if is_cuda else None for _ in range(2)]

    def bucketize(self, buffer: int) -> None:
        """Bucketize the buffer's batch, on the current stream, once the buffer is filled."""
        self._buffers.wait_until_filled(buffer)
        graph, done = self._graphs[buffer], self._done[buffer]
        # Before the first capture, and on a CPU, the same work runs as it is.
        if graph is None:
            self._bucketize(buffer)
        else:
            graph.replay()
        if done is not None:
            done.record()
        # No step may read what is bucketized again for a capture, or is never trained.
        self._buffers.note_use(buffer)

    def needed(self, buffer: int) -> list[int]:
        """The :attr:`Capacity.numbers` that the buffer's batch needs; waits for the last
        :meth:`bucketize`."""
        done = self._done[buffer]
        if done is not None:
            done.synchronize()
        return self._needed[buffer].tolist()

    def wait_until_bucketized(self, buffer: int) -> None:
        """Let the current stream wait for the last :meth:`bucketize`."""
        wait_for(self._done[buffer])

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture the work for both buffers, where that was not done, and do it again."""
        for buffer in (0, 1):
            if self._graphs[buffer] is None:
                call = functools.partial(self._bucketize_on_gpu, buffer)
                self._graphs[buffer] = captured_graph(call, stream)
                # A capture computes nothing, and the graph's memory is new: the buffer's batch must
                # be there when the step reads it.
                self.bucketize(buffer)

    def release(self) -> None:
        """Destroy the graphs."""
        for graph in self._graphs:
            if graph is not None:
                graph.reset()
        self._graphs = [None, None]

    def _bucketize_on_gpu(self, buffer: int) -> None:
        self._bucketize(buffer)
        # On one rank that may be nothing, and torch warns of graphs without any work.
        torch.zeros(1, device=self._device)

    def _bucketize(self, buffer: int) -> None:
        batch = bucketize(self._calls, self._buffers.batches[buffer], self._device)
        assert batch.needed is not None
        self._needed[buffer].copy_(batch.needed, non_blocking=True)
        self.batches[buffer] = batch
