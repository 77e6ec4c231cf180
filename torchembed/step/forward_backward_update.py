"""The work of a step: forward, backward and update of one batch, for the steps of every engine.

On a GPU the parts run on several streams, and what others wait for comes first: vectors, then ids,
then rows. On a CPU, and in eager steps, all streams are None and the parts come one after another.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.core.trees import map_tensors
from torchembed.modules.lookup.bad_ids import IdChecks, deferred_id_checks
from torchembed.modules.lookup.forward_admission import skipped_where
from torchembed.modules.table_module import TableModule
from torchembed.optim.clipping import clip_gradients
from torchembed.sharding.transport.collectives import GatheredSize, recorded_sizes
from torchembed.step.bad_id_flag import either, reduce_checks
from torchembed.step.batches.batch_layout import without_gradients
from torchembed.step.batches.counted_parts import for_model
from torchembed.step.batches.padded_parts import PaddedParts
from torchembed.step.dense_updates import DenseUpdates
from torchembed.step.lookup_calls import reusing
from torchembed.step.model_loss import ComputeLoss
from torchembed.step.stages import LookedUpBatch, TrainedBatch
from torchembed.step.step_optimizers import StepOptimizers, update, update_early
from torchembed.step.step_record import StepRecord
from torchembed.step.step_result import StepOutputs
from torchembed.step.streams import StepStreams, fork, join, named_range, on_stream
from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.attribute_uses import AttributeUses
from torchembed.step.watches.host_state import HostState
from torchembed.step.watches.watched_values import WatchedValues
from torchembed.tables import Admission, RecordedGradients, table_of


class AdmissionEpochs:
    """Numbers the batches that are admitted to be trained, on the device and without waiting for
    it. One count serves all engines of a pipeline.

    Args:
        device: of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._last = torch.zeros(1, dtype=torch.int64, device=device)

    def admission(self, is_trained: Tensor | None) -> Admission:
        """The next batch, in an epoch of its own where it is trained, else in the last one.

        Args:
            is_trained: bool ``[1]`` on the device; None for a batch that is trained in any case.
        """
        self._last.add_(1 if is_trained is None else is_trained)
        return Admission(is_trained, self._last.clone())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """The work of every step of a pipeline, whichever engine takes it.

    Attributes:
        model: called by ``compute_loss``.
        compute_loss: the model and a batch on the device to the loss and the output.
        optimizers: of all parameters, as the caller gave them.
        device: where batches go.
        group: the ranks that train the model; None for one.
        max_grad_norm: bound of the norm of all gradients; None where they are not clipped.
        self_check_every: how many replays of a graph lie between comparisons with the model; None
            for no comparison.
        max_layouts: the most layouts of batches for which steps are captured.
        padding: the parts of batches that captured steps take with padding.
        loss_fn: of the pipeline, which ``compute_loss`` calls; what it changes is looked at.
    """

    model: nn.Module
    compute_loss: ComputeLoss
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    group: dist.ProcessGroup | None
    max_grad_norm: float | None = None
    self_check_every: int | None = None
    max_layouts: int = 16
    padding: PaddedParts = dataclasses.field(default_factory=lambda: PaddedParts({}))
    loss_fn: object = None

    @property
    def is_cuda(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    @functools.cached_property
    def trained(self) -> TrainedModules:
        """The model, and the loss function where that is a module of its own."""
        return TrainedModules.of(self.model, self.loss_fn)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters of the model, and those of the loss function that optimizers have, whose
        gradients steps clear."""
        named = list(self.trained.named_parameters())
        if self.trained.loss is None:
            return named
        held = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        held.update(map(id, self.model.parameters()))
        return [(name, parameter) for name, parameter in named if id(parameter) in held]

    @functools.cached_property
    def record(self) -> StepRecord:
        """Counts steps and captures, of all engines."""
        return StepRecord()

    @functools.cached_property
    def values(self) -> WatchedValues:
        """The values of the model and its optimizers that captured steps hold."""
        optimizers = StepOptimizers(self.optimizers)
        return WatchedValues(
            self.model,
            [*optimizers.of_tables, *optimizers.captured],
            optimizers.others,
            self.loss_fn,
            self.device,
        )

    @functools.cached_property
    def attribute_uses(self) -> AttributeUses:
        """Observes the attributes of modules that steps read and set."""
        return AttributeUses(self.values)

    @functools.cached_property
    def host_state(self) -> HostState:
        """The state of the host that the model changes, and no graph."""
        return HostState(self.model, self.device, self.loss_fn)

    @functools.cached_property
    def fetches_rows(self) -> bool:
        """True if looking a batch up may bring rows to the device, which no other batch may do at
        the same time."""
        return any(m.fetches_rows for m in self.model.modules() if isinstance(m, TableModule))

    def wait_for_lines(self) -> None:
        """Wait until host memory holds the rows on disk of all batches so far.

        Raises:
            Exception: what reading or writing the disk failed with.
        """
        for module in self.model.modules():
            if isinstance(module, TableModule):
                module.wait_for_lines()

    def release_forwards(self) -> None:
        """Let go of the rows that forwards have admitted, since no update will train them."""
        for module in self.model.modules():
            if isinstance(module, TableModule):
                module.release_forwards()

    def release_prepared(self) -> None:
        """Let go of the rows of batches that were prepared ahead, none of which is under way."""
        for module in self.model.modules():
            if isinstance(module, TableModule):
                module.release_prepared()

    @functools.cached_property
    def epochs(self) -> AdmissionEpochs | None:
        """Numbers the batches whose rows tables admit, for all engines, and keeps the rows of those
        under way in place; None where no table inserts or evicts rows."""
        modules = (m for m in self.model.modules() if isinstance(m, TableModule))
        changes_tables = any(module.admission_changes_tables for module in modules)
        return AdmissionEpochs(self.device) if changes_tables else None


_NOTHING = contextlib.nullcontext()
PrepareNext = Callable[[torch.cuda.Stream | None], None]
"""Prepares the next batch concurrently with the step, after what the given stream holds."""


class ForwardBackwardUpdate:
    """Trains one batch.

    Args:
        program: what a step does.
        optimizers: the program's, by who steps them.
        streams: where the parts run.
        dense_updates: when the captured optimizers of dense parameters update.
        id_checks: makes a context that collects the checks of forward's lookups, or in which they
            raise.
        notes_sizes: keep :attr:`forward_sizes`, which a capture of forward needs.
    """

    def __init__(
        self,
        program: StepProgram,
        optimizers: StepOptimizers,
        streams: StepStreams,
        dense_updates: DenseUpdates,
        id_checks: IdChecks = deferred_id_checks,
        *,
        notes_sizes: bool = True,
    ) -> None:
        self._program, self._optimizers = program, optimizers
        self._id_checks, self._notes_sizes = id_checks, notes_sizes
        self._streams, self._dense_updates = streams, dense_updates
        self.has_begun_update = False
        """True if a step has begun to change rows and parameters."""
        self.forward_sizes: list[GatheredSize] = []
        """Sizes that ranks told each other in the last forward, of ids that it looked up itself."""

    def __call__(
        self,
        batch: LookedUpBatch,
        prepare_next: PrepareNext | None = None,
        report_memory: Tensor | None = None,
        loss_memory: Tensor | None = None,
    ) -> TrainedBatch:
        """Train ``batch``, but for the optimizers that no graph can hold.

        Args:
            prepare_next: called once: so that it runs under forward where vectors were looked up
                ahead, else under backward.
            report_memory: pinned memory for the report.
            loss_memory: memory ``[]`` for the loss of the result; None for its own.

        Raises:
            Exception: what the model, the loss function or an optimizer raised; the rows of the
                batch are let go of, as where it is trained.
        """
        try:
            return self._trained(batch, prepare_next, report_memory, loss_memory)
        except BaseException:
            if not (self._program.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._release(batch)
                self._program.release_forwards()
            raise

    def _trained(
        self,
        batch: LookedUpBatch,
        prepare_next: PrepareNext | None,
        report_memory: Tensor | None,
        loss_memory: Tensor | None,
    ) -> TrainedBatch:
        program, streams = self._program, self._streams
        self._optimizers.zero_grad()
        with named_range("torchembed: forward"), self._id_checks() as checks:
            if batch.calls and prepare_next is not None:
                # On several ranks its exchange of ids would delay this step's vectors; and where
                # rows live outside the device, both may bring some there.
                is_free = program.group is None and not program.fetches_rows
                prepare_next(None if is_free else streams.vectors)
            with (
                reusing(batch.calls, batch.lookups, batch.data) if batch.calls else _NOTHING,
                self._skipped_forward(batch),
            ):
                # Further steps take the batch's containers as they are now.
                data = for_model(batch.data)
                with recorded_sizes() if self._notes_sizes else _NOTHING as sizes:
                    loss, output = program.compute_loss(program.model, data)
                self.forward_sizes = sizes or []
        # Of lookups that were not prepared ahead, the ids were checked in forward.
        flag = either(batch.flag, reduce_checks(checks, program.group))
        # On a stream that nothing waits for soon: the copy to the host need not delay backward.
        with fork(streams.ids):
            report = None if flag is None else flag.to_host(report_memory)
            found = loss.detach() if loss_memory is None else loss_memory.copy_(loss.detach())
        if not batch.calls and prepare_next is not None:
            prepare_next(None)
        for stream in (streams.rows, streams.last_rows):
            if stream is not None:
                # Before backward: the update of rows begins with what needs no gradients.
                stream.wait_stream(torch.cuda.current_stream())
        # Every update from here on is predicated on the flag. Whatever changed a row or a weight
        # before the flag was known could not be undone.
        skip, backward_stream = None if flag is None else flag.skip, self._backward_stream()
        with self._dense_updates.around_backward(skip):
            with named_range("torchembed: backward"), fork(backward_stream):
                loss.backward()
            self.has_begun_update = True
            # Before the context ends, where deferred gradients of weights are computed: these run
            # concurrently with the rows' updates.
            recorded = [] if self._clips else self._update_rows(skip, early=True)
        if self._clips:
            self._clip(backward_stream)
        # Gradients of tables that every rank holds come with the dense ones.
        recorded += self._update_rows(skip, early=False)
        join(backward_stream)
        with named_range("torchembed: update"):
            self._dense_updates.update(skip)
        join(streams.rows, streams.last_rows)
        # Only now may the allocator hand out their memory again: it knows of one stream alone.
        del recorded
        # A capture must end with all forked streams joined, and the next replay may overwrite what
        # they read.
        join(streams.ids, streams.vectors if batch.calls else None)
        # Rows may be evicted again only once their updates are done.
        self._release(batch)
        result = StepOutputs(found, map_tensors(Tensor.detach, output), without_gradients(data))
        return TrainedBatch(result, skip, report, [*batch.checks, *checks])

    def _release(self, batch: LookedUpBatch) -> None:
        """Let tables evict the rows of a batch that were admitted ahead of it."""
        if batch.epoch is not None:
            for call in batch.calls:
                call.collection.release(batch.epoch)

    def _skipped_forward(self, batch: LookedUpBatch) -> contextlib.AbstractContextManager[None]:
        """A context for forward, which admits no ids where lookups ahead of it found bad ones."""
        if self._program.epochs is None or batch.flag is None:
            return _NOTHING
        return skipped_where(batch.flag.skip)

    @property
    def _clips(self) -> bool:
        return self._program.max_grad_norm is not None

    def _clip(self, backward_stream: torch.cuda.Stream | None) -> None:
        """Scale all gradients, which are there, so that their norm is within the program's bound.
        Updates of rows wait for it."""
        program, streams = self._program, self._streams
        assert program.max_grad_norm is not None
        join(backward_stream)
        with named_range("torchembed: clip"):
            clip_gradients(
                [parameter for _, parameter in program.named_parameters()],
                program.max_grad_norm,
                device=program.device,
                group=program.group,
            )
        for stream in (streams.rows, streams.last_rows):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())

    def _backward_stream(self) -> torch.cuda.Stream | None:
        """The stream on which to call backward; None for the current one.

        The stream that calls backward waits at its end for every stream on which a leaf of the
        graph got its gradient, also for the lookups', whose leaves are tables. Deferred gradients
        of weights need not wait for those, so backward has a stream of its own.
        """
        if self._streams.gradients is None:
            return None
        tables = [t for p in self._program.model.parameters() if (t := table_of(p)) is not None]
        return self._streams.gradients if all(table.group.rule for table in tables) else None

    def _update_rows(self, skip: Tensor | None, *, early: bool) -> list[RecordedGradients]:
        """Update rows, each table group's as soon as its gradients are there, on a stream of their
        own. ``early`` while the mean over ranks of some gradients is still under way.

        Returns:
            What must be held until the streams have joined, or its memory would be used again.
        """
        optimizers = self._optimizers.of_tables
        if not optimizers:
            return []
        recorded = [entry for optimizer in optimizers for entry in optimizer.recorded()]
        if recorded or not early:
            stream = self._streams.rows
            if not early and stream is not None and torch.cuda.is_current_stream_capturing():
                # In uncaptured steps a learning rate may be set on the stream of rows, and an
                # update on another one would not wait for it.
                stream = self._streams.last_rows
            with on_stream(stream), named_range("torchembed: rows"):
                (update_early if early else update)(optimizers, skip)
        return recorded
