"""A train step on batches whose lengths vary without bound: nothing waits for the GPU.

How many ids travel, only the GPU knows at first. A thread of its own finds out for the batches to
come, and tells the other ranks through the CPU; the ids themselves are sent from the step, at one
point of it on every rank, since collectives on two communicators that come in different orders may
wait for each other for ever.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import nn

from torchembed.core.named_range import named_range
from torchembed.core.trees import tensors_in
from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.modules.preparing import Announced, Prepared
from torchembed.modules.table_module import TableModule
from torchembed.step.bad_batches import Verdict, judge
from torchembed.step.batch_layout import is_on_gpu, to_device, with_sparse_features
from torchembed.step.collection_calls import CollectionCall, handing_over, observed_calls
from torchembed.step.eager_step import eager_step
from torchembed.step.loss import ComputeLoss
from torchembed.step.step_optimizers import Assumptions, StepOptimizers
from torchembed.step.step_result import StepOutcome
from torchembed.step.streams import between, event_on, on, wait_for
from torchembed.step.worker import Worker

_CLOSE_SECONDS = 10.0
"""For what was announced to reach all ranks; where it takes longer, one of them is gone."""


class _AnnouncedBatch(NamedTuple):
    """A batch on the device, of which no id has travelled."""

    batch: Any
    of_calls: list[Announced]
    suspects: list[Suspect]
    ready: "torch.cuda.Event | None"


class _PreparedBatch(NamedTuple):
    """A batch whose ids are where their rows are."""

    batch: Any
    of_calls: list[Prepared]
    suspects: list[Suspect]
    verdict: Verdict | None
    ready: "torch.cuda.Event | None"


class JaggedBatch:
    """A batch on its way to its step."""

    def __init__(self, source: Any, announced: "Future[_AnnouncedBatch]") -> None:
        self._source = source
        """Held as long as this: it may still be copied from."""
        self._announced = announced
        self._prepared: _PreparedBatch | None = None

    def prepared(self, prepare: Callable[[_AnnouncedBatch], _PreparedBatch]) -> _PreparedBatch:
        """Once prepared, it stays so."""
        if self._prepared is None:
            self._prepared = prepare(self._announced.result())
        return self._prepared

    @property
    def has_failed(self) -> bool:
        """Whether it could not be announced; waits until that is known."""
        return self._announced.exception() is not None


class JaggedStep:
    """Steps on batches of one layout but for the lengths of bags.

    The first one, :meth:`observe`, finds out which collections look up which of a batch's tensors;
    batches after it are announced, in their order, and trained.

    Args:
        group: the ranks that train together; None for one.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        group: Any,
    ) -> None:
        self._model, self._compute_loss, self._group = model, compute_loss, group
        self._device = device
        self._optimizers = StepOptimizers(optimizers)
        self._assumptions = Assumptions(model, self._optimizers, device)
        self.calls: list[CollectionCall] = []
        """Once observed; the model may have other lookups."""
        self.worker = Worker("torchembed: sizes of batches to come")
        self._stream = self._ids_stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._ids_stream = torch.cuda.Stream(device)

    @property
    def is_stale(self) -> bool:
        """Whether what its steps take for granted has changed."""
        return self._assumptions.are_stale

    @property
    def can_be_padded(self) -> bool:
        """Whether shapes follow from those of batches: all collections pool, and are called with
        the batch's own features."""
        called = {call.collection for call in self.calls}
        tables = [module for module in self._model.modules() if isinstance(module, TableModule)]
        return (
            bool(called)
            and all(module in called for module in tables)
            and all(collection.is_pooled for collection in called)
        )

    def release(self) -> None:
        """End the thread."""
        self.worker.close(_CLOSE_SECONDS)

    def announce(self, batch: Any, is_wanted: Callable[[], bool]) -> JaggedBatch:
        """Have the thread copy ``batch`` to the device and find out what travels, where
        ``is_wanted()``, the same on all ranks, says so."""
        given = event_on(torch.cuda.current_stream()) if is_on_gpu(batch) else None
        task = functools.partial(
            _announce, self.calls, batch, given, is_wanted, self._device, self._ids_stream
        )
        return JaggedBatch(batch, self.worker.submit(task))

    def observe(self, source: Any) -> StepOutcome:
        """Train the first batch, from wherever it is."""
        with between(self._stream):
            batch = to_device(source, self._device)
            with observed_calls(self._model, batch) as self.calls:
                return eager_step(
                    self._model,
                    self._compute_loss,
                    self._optimizers,
                    batch,
                    self._group,
                    held=source,
                )

    def run(self, now: JaggedBatch, following: JaggedBatch | None) -> StepOutcome:
        """Train ``now``, and send the ids of ``following``.

        Raises:
            IndexError, ValueError, TypeError: as the model's forward would; for ``following`` too,
                where other ranks wait for its ids.
        """
        if following is not None and self._group is None and following.has_failed:
            following = None
        with between(self._stream):
            prepared = now.prepared(self._prepare)
            with named_range("torchembed: look up"):
                looked_up = self._looked_up(prepared)
            # The one point at which ids travel: behind this step's vectors, whose way is not
            # delayed, and beside its dense part.
            if following is not None:
                with named_range("torchembed: prepare"):
                    following.prepared(self._prepare)
            with handing_over(self.calls, looked_up):
                outcome = eager_step(
                    self._model,
                    self._compute_loss,
                    self._optimizers,
                    prepared.batch,
                    self._group,
                    held=now,
                    known=prepared.verdict,
                    known_suspects=prepared.suspects,
                )
        if self._stream is not None:
            # The caller gets it, which lives in the memory of another stream.
            for tensor in tensors_in(with_sparse_features(prepared.batch)):
                tensor.record_stream(torch.cuda.current_stream())
        return outcome

    def _looked_up(self, prepared: _PreparedBatch) -> list[Prepared]:
        wait_for(prepared.ready)
        return [
            call.collection.look_up(of_call)
            for call, of_call in zip(self.calls, prepared.of_calls, strict=True)
        ]

    def _prepare(self, announced: _AnnouncedBatch) -> _PreparedBatch:
        """Send the ids, and find their rows."""
        batch, of_calls, suspects, ready = announced
        with on(self._ids_stream):
            wait_for(ready)
            with deferred_bad_ids() as more:
                prepared = [
                    call.collection.prepare_announced(of_call)
                    for call, of_call in zip(self.calls, of_calls, strict=True)
                ]
            suspects = [*suspects, *more]
            with torch.no_grad():
                verdict = judge(suspects, self._group)
            return _PreparedBatch(batch, prepared, suspects, verdict, event_on(self._ids_stream))


def _announce(
    calls: Sequence[CollectionCall],
    source: Any,
    given: "torch.cuda.Event | None",
    is_wanted: Callable[[], bool],
    device: torch.device,
    stream: "torch.cuda.Stream | None",
) -> _AnnouncedBatch | None:
    """What the thread does for a batch, that is there from ``given`` on."""
    if not is_wanted():
        return None
    with on(stream), deferred_bad_ids() as suspects:
        wait_for(given)
        batch = to_device(source, device)
        of_calls = [call.collection.announce(call.features_of(batch)) for call in calls]
        return _AnnouncedBatch(batch, of_calls, suspects, event_on(stream))
