"""``TrainPipeline``: steps whose host work is one launch and the next batch's copy."""

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from torchembed.core import ranks
from torchembed.modules.table_module import TableModule
from torchembed.optim.joint import separate
from torchembed.optim.trained_parameters import check_optimizers_train
from torchembed.step.batch_intake import BatchIntake
from torchembed.step.batches.batch_layout import to_device
from torchembed.step.batches.padded_parts import Pad, PaddedParts
from torchembed.step.batches.read_ahead import InputStalls, ReadAhead
from torchembed.step.engines.engine import StepEngine
from torchembed.step.engines.engine_choice import EngineChoice
from torchembed.step.forward_backward_update import StepProgram
from torchembed.step.growing_tables import TablesThatGrow
from torchembed.step.model_loss import (
    ComputeLoss,
    LossFunction,
    check_loss_fn,
    convert_batch,
    loss_and_output,
)
from torchembed.step.pipeline_settings import (
    check_model,
    check_numbers,
    group_of,
    listed,
    push_domains_of,
    why_not_captured,
)
from torchembed.step.pipeline_turns import PipelineTurns
from torchembed.step.stages import ReadBatch, Reason, StepKind
from torchembed.step.step_result import StepResult
from torchembed.step.steps_in_flight import StepsInFlight
from torchembed.step.streams import named_range
from torchembed.step.trained_modules import module_of_loss
from torchembed.step.watches.joint_changes import Joint, JointChanges
from torchembed.tables import model_device

_STEPS_AHEAD = 2
"""The most steps that the host is ahead of the device."""
_RELEASE_SECONDS = 2.0
"""Longest wait for the steps under way before graphs are destroyed."""
_OF_ANOTHER_RANK = Reason("another rank's model changes again and again, as its warning says")


class TrainPipeline:
    """Trains a model batch by batch; on a GPU each step is one CUDA graph, collectives included.

    The graph holds the lookup, the dense part as the model's own code computes it, and the updates
    of rows and of dense weights. On further streams it also holds what can be done ahead for the
    ids of the next batch: their exchange, check and sorting. The host launches the graph and begins
    to copy the batch after that; it never waits for the step under way. The first steps train
    without a graph, and compile kernels.

    A captured step must not wait for the GPU, nor depend on values on the host. There are four
    engines:

    - static: batches of fixed hotness, with a graph for each layout (shapes, dtypes, numbers and
      strings) that recurs: that of the first batch, and each that comes twice, up to
      ``max_layouts``;
    - padded: batches whose lengths vary (jagged ``SparseFeatures``, a ``KeyedJaggedTensor``), in a
      graph with room for a quarter more ids than the first batch has. A thread finds out ahead
      whether a batch fits; for one that does not, a step with more room is captured. In a padded
      step a feature with a vector for each id has zeros after its last bag; a model whose result
      depends on them is found by a comparison before it trains;
    - jagged: batches whose lengths vary, of other models, without a graph. The thread finds out
      sizes, and the main thread never waits for a GPU;
    - eager: all other batches, such as a smaller last one. All ranks take the same engine.

    If a capture fails, a warning says why, and such steps are eager from then on. All steps are
    eager, as a warning says, if the tables are sharded over some of all processes. Use the pipeline
    in a ``with``, or :meth:`close` it, before the process group is destroyed.

    Optimizers of torchembed are captured, and so are those of torch whose groups have
    ``capturable=True`` and a tensor ``lr`` on the GPU; others step right after the graph.

    Changes between steps: parameters may be frozen, moved or loaded, modules set to training or
    evaluation, and hyperparameters, buffers and attributes replaced: steps are captured anew. If
    one changes again and again, or in forward itself, steps are eager from then on, and a warning
    names it. The learning rate may change at every step, and so may attributes that forward does
    not read; attributes that it sets are copies after each step. Values that no module holds, such
    as global variables, are watched if the code of ``forward`` or of the loss function names them.
    All ranks must make a change before the same step; if one alone does, the change begins with the
    next batch that is read, and a warning names it, unless every rank calls
    :meth:`take_up_changes`.

    Random numbers of the host (Python's, NumPy's, torch's CPU generator, generators of modules)
    make steps eager if forward draws them, and a warning names the generator. The GPU's generator
    works in graphs.

    Hooks make steps eager while they are registered on a module, a parameter or an optimizer, or
    globally, since no graph can call Python, and a warning names one; torch's own, such as those of
    pruning, are captured. The same holds for a ``forward`` that replaces a module's or a class's,
    and for an optimizer's ``step`` or ``zero_grad`` that was replaced; an optimizer that steps
    after the graph may have a ``step`` of its own.

    A bad id in one rank's batch makes the step of all ranks change nothing (except buffers, such as
    those of batch norm), and a later call raises; on a CPU the call itself raises.

    Args:
        model: sharded or not. Called as ``model(dense, sparse)`` for batches ``(dense, sparse,
            labels)``, and as ``model(inputs)`` for ``(inputs, labels)``.
        loss_fn: maps ``(output, labels)`` to their mean loss ``[]``, or ``(output, labels,
            weights)`` for batches ``(dense, sparse, labels, weights)``. An output ``[B, 1]`` is
            given as ``[B]`` if the labels are ``[B]``, unless the function takes the column itself.
            With :class:`~torchembed.training.BatchLoss` of ``(output, batch)`` the model is called
            as ``model(batch)``. None is for a model that is called as ``model(batch)`` and returns
            its loss: alone, as the first of a tuple or list, or by the name ``loss``.
        optimizers: one, or several, that together hold every parameter that requires a gradient,
            and no others. Captured steps may update them in another order.
        device: where batches go; the model's by default.
        autocast: the dtype of ``torch.autocast`` around forward and loss, as ``torch.bfloat16``.
            The gradients of ``torch.float16`` vanish unless ``loss_fn`` scales the loss, which the
            pipeline does not do by itself.
        max_grad_norm: a bound of the joint 2-norm of all gradients, after their mean over ranks: of
            dense parameters and of all ranks' rows, each row's summed gradient once. If the norm is
            larger, all are scaled before any update, as ``torch.nn.utils.clip_grad_norm_`` does, in
            captured steps too. Updates then begin only after backward. None does not clip.
        capture: True captures steps as graphs if possible; on a CPU, which has no graphs, the same
            steps run uncaptured. False runs eager steps only. None means True on a GPU and False on
            a CPU, where preparing ahead gains nothing.
        timeout_seconds: how long the host waits for a step of the GPU, and GPUs that push wait for
            each other, before they give up; NCCL does not watch collectives in a graph.
        self_check_every: a captured step is compared with the model, on the same batch and weights,
            after its first replay and then every so many. If outputs, loss or dense gradients
            differ by more than rounding explains, a warning names the first module whose output
            does, and steps run eagerly from then on. None compares nothing.
        max_layouts: the most layouts of batches that have captured steps at a time; their graphs
            share one memory pool. Batches of further layouts are trained eagerly; if many of them
            come in succession, steps are captured anew, beginning with a layout of these.
        pad: for parts of a batch whose last dimension varies, such as histories ``[B, T]`` padded
            to each batch's longest, the value of columns that the model ignores: ``{"items": 0}``,
            or ``{"inputs.items": Padding(value=0, length=200)}``. Captured steps get them padded to
            the length, or to the longest so far, so that one graph serves all; eager steps get them
            unpadded. Before the first padded step, and every ``self_check_every`` steps, the model
            is called on a batch with and without padding; if loss or gradients differ, a warning
            says so, and nothing is padded or captured from then on.

    Raises:
        ValueError: if a parameter that requires a gradient has no optimizer, or an optimizer has
            one that is not the model's; for a negative ``max_grad_norm``, or ``max_layouts`` below
            1.
        TypeError: if ``pad`` is not a mapping from paths to values.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        capture: bool | None = None,
        timeout_seconds: float = 600.0,
        self_check_every: int | None = 2000,
        max_layouts: int = 16,
        pad: Pad | None = None,
    ) -> None:
        check_model(model)
        check_numbers(
            autocast=autocast,
            max_grad_norm=max_grad_norm,
            timeout_seconds=timeout_seconds,
            self_check_every=self_check_every,
            max_layouts=max_layouts,
        )
        padding, given = PaddedParts({} if pad is None else pad), listed(optimizers)
        self.model, self.loss_fn, self.optimizers = model, loss_fn, separate(given)
        check_loss_fn(loss_fn)
        check_optimizers_train(model, self.optimizers, module_of_loss(model, loss_fn))
        self.device = model_device(model) if device is None else torch.device(device)
        is_cuda = self.device.type == "cuda"
        # A bound method would make a reference cycle: graphs should be destroyed with the pipeline,
        # and not at the next garbage collection, which may come after their communicators are gone.
        compute_loss: ComputeLoss = functools.partial(
            loss_and_output,
            loss_fn=loss_fn,
            autocast=torch.autocast(self.device.type, autocast, enabled=autocast is not None),
        )
        program = StepProgram(
            model=model,
            compute_loss=compute_loss,
            optimizers=given,
            device=self.device,
            group=group_of(model),
            max_grad_norm=max_grad_norm,
            self_check_every=self_check_every,
            max_layouts=max_layouts,
            padding=padding,
            loss_fn=loss_fn,
        )
        self._record = program.record
        self._upcoming = ReadAhead()
        self._in_flight = StepsInFlight(timeout_seconds, push_domains_of(model), is_cuda=is_cuda)
        self._engines = EngineChoice(
            program,
            not_captured=why_not_captured(capture, program.group, is_cuda=is_cuda),
            wait_for_steps=self._in_flight.wait_for_all,
        )
        self._steps_ahead = _STEPS_AHEAD if is_cuda else 0
        self._intake = BatchIntake(model, loss_fn, self._engines, padding, max_layouts)
        modules = self._modules = [m for m in model.modules() if isinstance(m, TableModule)]
        self._timed = [module for module in modules if module.timed_indices()]
        self._on_disk = [module for module in modules if module.disk_groups()]
        self._growing = TablesThatGrow(model)
        self._turns = PipelineTurns(model, self._engines, self._upcoming)
        self._is_alone = ranks.world_size() == 1
        self._changes = JointChanges(self._engines.values, self._engines.hooks)
        if self._engines.captures:
            ranks.check_cpu_backend()

    def progress(self, batches: Iterable[Any]) -> StepResult:
        """Train on the next batch; on a GPU also begin to copy a later one.

        Args:
            batches: an iterator of ``(inputs, labels)``, or of what
                :func:`~torchembed.data.batch.as_batch` takes, also with weights of samples as a
                fourth part; without a loss function of labels, of nested tuples, lists, mappings
                and dataclasses of tensors. Each call is given the same iterator, which is read two
                batches ahead on a GPU: a position in the data that is to be saved, :class:`Epochs`
                too, is right once the iterator has ended, as it has after each :func:`train`. Every
                rank's gives equally many. What was read ahead of another iterator is left out. An
                iterable, such as a ``DataLoader``, is iterated by the calls that are given it one
                after the other, and once more by those after its end.

        Returns:
            The loss, the model's output and the batch, which may be kept where they are read before
            the next call; and the kind of the step. Nothing waits for them.

        Raises:
            StopIteration: after the last batch.
            IndexError: for a bad id of this batch on the CPU, of an earlier one on a GPU.
            TimeoutError: if the device has not finished a step in ``timeout_seconds``. One of
                several ranks then ends soon, also where closing it hangs.
            RuntimeError: if another pipeline has prepared a batch for the same dynamic tables.
            Exception: what reading a batch raised, once those before it are trained; of several
                ranks at the next call, since the others may wait for this one to read.
        """
        self._turns.begin()
        if self._growing.are_due_next:  # nothing was prepared by the step before
            self._begin_anew()
            self._growing.grow()
        now = self._next(batches)
        self._follow_layouts(now)
        is_last = self._is_last_before_growth(now)
        for module in self._timed:
            for index in module.timed_indices():
                index.note_time()
        with self._growing.held():
            trained = self._engines.run(now, [] if is_last else list(self._upcoming))
        self._in_flight.add(trained)
        if not self._steps_ahead:
            self.check_ids()
        self._read_ahead()
        return StepResult(trained.result, self._engines.last_kind, trained.place)

    def _is_last_before_growth(self, now: ReadBatch) -> bool:
        """True if dynamic tables are to grow once ``now`` is trained, and before another batch is
        admitted; where they are to grow before ``now`` is admitted, they have."""
        if self._growing.are_over:
            return False
        is_prepared = self._engines.has_prepared(now)
        self._growing.before_step(is_prepared=is_prepared)
        if self._growing.are_due:
            self._in_flight.wait_for_all()
            self._engines.release()
            self._growing.grow()
        return self._growing.are_due_next

    def take(self, batches: Iterable[Any]) -> Any:
        """The batch that :meth:`progress` would train next, on the device, which it is not trained
        with; arguments and errors are the same."""
        now = self._next(batches)
        batch = to_device(now.data, self.device)
        self._read_ahead()
        return batch

    def _next(self, batches: Iterable[Any]) -> ReadBatch:
        has_upcoming = len(self._upcoming) > 0
        try:
            self._upcoming.follow(batches)
            self._upcoming.check()
        finally:
            if has_upcoming and not len(self._upcoming):
                # The batch that was prepared is left out.
                for module in self._modules:
                    module.release_prepared()
        # Bounds the host's lead: two steps are enough to hide launches, and a bad id or a dead rank
        # is noticed as many steps late.
        self._in_flight.wait_until(max(self._steps_ahead - 1, 0))
        if self._engines.captures:
            self._engines.values.look()
            if self._engines.is_stale:
                why = self._engines.note_stale()
                if why is not None:
                    self._engines.capture_no_more(why)
                self._begin_anew()
            if not self._is_alone:
                self._follow(self._changes.before_step(has_read=len(self._upcoming) > 0))
        self._upcoming.fill(2 if self._engines.captures else 1, self._intake.take_in)
        now = self._upcoming.pop()
        if now is None:
            self.check_ids()
            raise StopIteration
        return now

    def _follow(self, found: Joint) -> None:
        """Begin anew for what all ranks have found changed, and train eagerly where hooks came."""
        if found.values or found.hooks:
            self._begin_anew()
        if found.hooks:
            self._upcoming.replace(self._intake.trained_eagerly)

    def _begin_anew(self) -> None:
        """Capture further steps anew; the log says which value has changed."""
        changed = self._engines.values.outdated
        if changed is not None:
            self._record.note_change(changed)
        try:
            self.check_ids()
        finally:
            self._release()

    def _follow_layouts(self, now: ReadBatch) -> None:
        """Begin anew where on any rank the layout of captured steps is another one by now."""
        if self._engines.captures and self._intake.begins_anew(now):
            self._in_flight.wait_for_all()
            self._engines.release()

    def _read_ahead(self) -> None:
        if self._engines.captures:
            with named_range("torchembed: copy"):
                self._upcoming.fill(2, self._intake.take_in)

    def convert(self, item: Any) -> Any:
        """A batch that was read, in the form in which the model and the loss function are called
        for it; one in that form is returned as it is.

        Raises:
            TypeError, ValueError: if it is no batch for this loss function; says what would be.
        """
        return convert_batch(item, self.loss_fn)

    def close(self) -> None:
        """Wait for the steps so far, and destroy the graphs; leaving a ``with`` does so too.

        Close the pipeline before ``torch.distributed.destroy_process_group``, which would wait
        forever for graphs that hold collectives. Further steps would be captured anew.

        Raises:
            IndexError, TimeoutError: as :meth:`progress`.
        """
        try:
            self.check_ids()
        finally:
            self._end()

    def _end(self) -> None:
        """Destroy the graphs and end the threads, unless a step hangs."""
        if self._release():
            for module in self._on_disk:
                module.stop_threads()

    def _release(self) -> bool:
        """Destroy the graphs, unless a step hangs, for which that might wait for ever: then
        False. A batch that was prepared ahead is prepared again, if it is trained at all."""
        is_finished = self._in_flight.finish_within(_RELEASE_SECONDS)
        if is_finished:
            self._engines.release()
            for module in self._modules if len(self._upcoming) > 0 else ():
                module.release_prepared()
        return is_finished

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def take_up_changes(self) -> None:
        """Capture anew on all ranks where the model was changed on one of them.

        Collective. What all ranks change alike needs no such call. Where one alone has frozen,
        moved or loaded a table, changed a value that forward reads, or registered a hook, every
        rank calls it before the next step. :func:`train` begins with it.

        Raises:
            IndexError, TimeoutError: as :meth:`close`.
        """
        ranks.check_cpu_backend()
        values, captures = self._engines.values, self._engines.captures
        if captures:
            values.look()
        is_stale, is_outdated, has_hooks = ranks.any_rank_each(
            self._engines.is_stale,
            values.outdated is not None,
            captures and self._engines.hooks.are_there,
        )
        if is_stale:
            why = self._engines.note_stale()
            # The others may not know of what this rank alone holds.
            if ranks.any_rank(why is not None):
                self._engines.capture_no_more(why or _OF_ANOTHER_RANK)
        if is_stale or is_outdated or has_hooks:
            self._begin_anew()
        if has_hooks:
            # The ranks may have agreed on the batches that were read before there were any.
            self._changes.note_hooks()
            self._upcoming.replace(self._intake.trained_eagerly)

    @property
    def engines(self) -> tuple[StepEngine, ...]:
        """The engines that batches are trained by now, but the eager one."""
        return self._engines.engines

    @property
    def engine(self) -> StepEngine:
        """The engine that trained the last batch."""
        return self._engines.last

    @property
    def kinds(self) -> Mapping[StepKind, int]:
        """The number of steps of each kind so far: captured and how, or eager and why.

        The logger ``torchembed.step`` has a line at level INFO for each change of kind.
        """
        return types.MappingProxyType(self._record.kinds)

    @property
    def num_captures(self) -> int:
        """The number of captures so far: two for each layout or capacity, one for each of two
        input buffers, and two more whenever a change of the model has steps captured anew."""
        return self._record.num_captures

    @property
    def num_read_ahead(self) -> int:
        """Number of batches that were read and not trained yet."""
        return len(self._upcoming)

    @property
    def input_stalls(self) -> InputStalls:
        """So far; zero where the iterators given to :meth:`progress` keep up."""
        return self._upcoming.stalls

    def check_ids(self) -> None:
        """Wait for the steps so far and raise for a bad id of them; on the CPU nothing waits."""
        self._in_flight.wait_until(0)
