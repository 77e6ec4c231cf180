"""``TrainPipeline``: steps whose host work is one launch and the next batch's copy."""

import collections
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from torchembed.core.trees import layout_of, map_tensors
from torchembed.data.batch import as_batch
from torchembed.modules.bad_ids import Suspect, deferred_bad_ids
from torchembed.modules.sharded_collection import ShardedCollection
from torchembed.sharding.channel import PushDomain
from torchembed.training import ranks
from torchembed.training.bad_batches import judge, raise_for
from torchembed.training.batch_layout import has_fixed_shape, to_device
from torchembed.training.ending import end_within
from torchembed.training.guarded_update import step_unless
from torchembed.training.loss import ComputeLoss, LossFunction, loss_and_output
from torchembed.training.static_step import StaticStep, StepResult

_WARM_UP_STEPS = 3
"""Before the first capture: the first finds out what is prepared ahead, the next two do it once for
each turn; kernels are compiled and communicators made on the way."""
_STEPS_AHEAD = 2
"""So many steps the host may be ahead of the device."""
_POLL_SECONDS = 2e-5
_GRACE_SECONDS = 10.0
"""For a program to say why it ends."""
_STALL_SECONDS = 1e-4
"""A batch that is ready comes faster."""
_RELEASE_SECONDS = 2.0
"""For the steps under way to end, where graphs are to be destroyed."""


class _Upcoming(NamedTuple):
    """A batch that was read and not trained yet."""

    batch: Any
    number: int
    is_static: Callable[[], bool]
    """Whether every rank's batch is of its layout and being copied to its slot."""

    @property
    def turn(self) -> int:
        return self.number % 2


class InputStalls(NamedTuple):
    """Waits for batches that were not ready."""

    count: int
    seconds: float


class _InFlight(NamedTuple):
    done: torch.cuda.Event
    report: Tensor | None
    suspects: list[Suspect]


class TrainPipeline:
    """Trains a model batch by batch; on GPUs each step is one CUDA graph, collectives inside.

    The graph holds the lookup, the dense part and its gradients as the model's own code makes
    them, the rows' and the dense updates, and beside them all of the next batch that its ids alone
    decide: their exchange, check, sorting and runs. The host launches it and begins the copy of the
    batch after that, on a stream of its own; it never waits for the step under way. The first steps
    run without a graph (they train as well, and compile what there is to compile).

    What can be captured must not wait for the GPU nor depend on values on the host: batches with
    fixed hotness, of one layout, that of the first of them. Others (a smaller last one; jagged ids)
    run eagerly, on all ranks where it is so on one, as all do on the CPU. Where capture fails, a
    warning says why, and steps are eager from then on. Use it in a ``with``, or :meth:`close` it,
    before the process group is destroyed.

    Optimizers: torchembed's and those of torch whose groups have ``capturable=True`` and a tensor
    ``lr`` on the GPU are captured, others step right after the graph. Hyperparameters but ``lr``
    must stay as they are. Parameters may be frozen, moved or loaded between steps, and modules set
    to training or evaluation: steps are captured anew. Where that concerns tables of some ranks
    only, :meth:`close` the pipeline on every rank then, so that all of them do.

    A bad id of a rank's batch makes the step of all ranks a step that changes nothing (but buffers,
    as batch norm's), and a later call raises; on the CPU, where nothing is hidden, it raises at
    once.

    Args:
        model: sharded or not. Called as ``model(dense, sparse)``, gives logits ``[B]`` or
            ``[B, 1]``; where ``loss_fn`` is None, ``model(batch)``, gives its loss, or a tuple of
            the loss and what else there is, as TorchRec's models for training do.
        loss_fn: ``(logits [B], labels [B])`` to their mean loss.
        optimizers: of all parameters; where steps are captured, tables are updated first.
        device: where batches go; the model's by default.
        autocast: the dtype of ``torch.autocast`` around forward and loss.
        capture: False for eager steps only.
        timeout_seconds: how long the host waits for a step of the GPU, and GPUs that push wait for
            each other, before they give the other ranks up; NCCL does not watch what is in a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        device: torch.device | str | None = None,
        autocast: torch.dtype | None = None,
        capture: bool = True,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.model, self.loss_fn, self.optimizers = model, loss_fn, list(optimizers)
        self.device = torch.device(next(model.parameters()).device if device is None else device)
        self.timeout_seconds = timeout_seconds
        # No method: graphs should go with the pipeline, not with the next garbage collection.
        self._compute_loss: ComputeLoss = functools.partial(
            loss_and_output,
            loss_fn=loss_fn,
            autocast=torch.autocast(self.device.type, autocast, enabled=autocast is not None),
        )
        self._group, self._push_domains = _group_of(model), _push_domains_of(model)
        for domain in self._push_domains:
            domain.limit_seconds = timeout_seconds
        self._captures = capture and self.device.type == "cuda"
        self._upcoming: collections.deque[_Upcoming] = collections.deque()
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._static: StaticStep | None = None
        self._layout: Any = None
        self._num_read = self._num_static_steps = 0
        self._prepared: int | None = None
        """The batch that the step before has prepared."""
        self.input_stalls = InputStalls(0, 0.0)
        """So far; zero where the iterators given to :meth:`progress` keep up."""
        if self._captures:
            ranks.check_cpu_backend()

    def progress(self, batches: Iterator[Any]) -> StepResult:
        """Take a step on the next batch, and begin to copy one to come.

        Args:
            batches: what :func:`~torchembed.data.batch.as_batch` takes; without ``loss_fn`` any
                nested tuples, lists, dicts and dataclasses of tensors. Each call is given the same
                iterator, which is read two batches ahead on a GPU: a position in the data that is
                to be saved, :class:`Epochs` too, is right once the iterator has ended, as it has
                after each :func:`train`. Every rank's gives equally many.

        Returns:
            The loss, the model's output and the batch; the next step but one may overwrite them.
            Nothing waits for them.

        Raises:
            StopIteration: after the last batch.
            IndexError: for a bad id of this batch on the CPU, of an earlier one on a GPU.
            TimeoutError: where the device has not finished a step in ``timeout_seconds``. One of
                several ranks then ends soon, also where closing it hangs.
        """
        while len(self._in_flight) >= _STEPS_AHEAD:
            self._finish_oldest()
        if self._static is not None and self._static.is_stale:
            self.close()
        if not self._upcoming:
            self._read(batches)
        if self._captures and len(self._upcoming) == 1:
            self._read(batches)
        if not self._upcoming:
            self.check_ids()
            raise StopIteration
        now = self._upcoming.popleft()
        if self._captures and now.is_static() and self._is_ready(now):
            result = self._static_step(now)
        else:
            result = self._eager_step(now.batch)
        if self._captures:
            with record_function("torchembed: copy"):
                self._read(batches)
        return result

    def close(self) -> None:
        """Wait for the steps so far, and destroy the graphs; leaving a ``with`` does it too.

        ``torch.distributed.destroy_process_group`` waits for ever for graphs that hold collectives,
        so close the pipeline, or let it go, before. Further steps would be captured anew.

        Raises:
            IndexError, TimeoutError: as :meth:`progress`.
        """
        try:
            self.check_ids()
        finally:
            self._release()

    def _release(self) -> None:
        """Destroy the graphs, but one that hangs: that might wait for it, and the error be lost."""
        deadline = time.monotonic() + _RELEASE_SECONDS
        if self._static is None or not all(_wait(s.done, deadline) for s in self._in_flight):
            return
        self._static.release()
        self._static, self._prepared = None, None

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
            self._release()

    def check_ids(self) -> None:
        """Wait for the steps so far and raise for a bad id of them; on the CPU nothing waits."""
        while self._in_flight:
            self._finish_oldest()

    def _read(self, batches: Iterator[Any]) -> None:
        """Read a batch, and begin its copy where it has the layout."""
        start = time.perf_counter()
        item = next(batches, None)
        seconds = time.perf_counter() - start
        if seconds > _STALL_SECONDS:
            count, total = self.input_stalls
            self.input_stalls = InputStalls(count + 1, total + seconds)
        if item is None:
            return
        batch = item if self.loss_fn is None else as_batch(item)
        number, fits = self._num_read, False
        self._num_read += 1
        if self._captures:
            fits = self._fits(batch)
            if fits:
                self._static_for(batch).slots.fill(number % 2, batch)
        agreed = ranks.start_all_ranks(fits) if self._captures else _never
        self._upcoming.append(_Upcoming(batch, number, agreed))

    def _fits(self, batch: Any) -> bool:
        """Whether ``batch`` has the layout of the static step, which the first that could sets."""
        layout = layout_of(batch)
        if self._layout is None and layout is not None and has_fixed_shape(batch):
            self._layout = layout
        return layout is not None and layout == self._layout

    def _static_for(self, example: Any) -> StaticStep:
        if self._static is None:
            self._static = StaticStep(
                self.model, self._compute_loss, self.optimizers, example, self.device, self._group
            )
            self._num_static_steps = 0
            for upcoming in self._upcoming:
                if layout_of(upcoming.batch) == self._layout:
                    self._static.slots.fill(upcoming.turn, upcoming.batch)
        return self._static

    def _is_ready(self, now: _Upcoming) -> bool:
        """Make the static step ready for ``now``; False where there is none any more."""
        is_new, static = self._static is None, self._static_for(now.batch)
        if is_new:
            static.slots.fill(now.turn, now.batch)
        static.slots.wait_until_filled(now.turn)
        static.slots.wait_until_filled(1 - now.turn)
        if self._prepared != now.number:
            static.prepare(now.turn)
        if self._num_static_steps < _WARM_UP_STEPS or static.is_captured(now.turn):
            return True
        error = None
        try:
            static.capture(now.turn)
        except Exception as caught:  # noqa: BLE001 - said in the warning, once all ranks know
            error = caught
        if not ranks.any_rank(error is not None):
            return True
        warnings.warn(
            f"the train step could not be captured as a CUDA graph, so steps run eagerly and wait "
            f"for the host: {_reason(error)}",
            stacklevel=3,
        )
        self._captures = False
        self._release()
        return False

    def _static_step(self, now: _Upcoming) -> StepResult:
        static = self._static
        assert static is not None
        with record_function("torchembed: step"):
            result = static.run(now.turn)
        self._num_static_steps += 1
        following = self._upcoming[0] if self._upcoming else None
        self._prepared = None if following is None else following.number
        report, suspects = static.verdict(now.turn)
        self._track(report, suspects)
        return result

    def _eager_step(self, host_batch: Any) -> StepResult:
        self._prepared = None
        batch = to_device(host_batch, self.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.device.type != "cuda":
            loss, output = self._compute_loss(self.model, batch)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            return StepResult(loss.detach(), map_tensors(Tensor.detach, output), batch)
        with deferred_bad_ids() as suspects:
            loss, output = self._compute_loss(self.model, batch)
        verdict = judge(suspects, self._group)
        loss.backward()
        for optimizer in self.optimizers:
            step_unless(optimizer, None if verdict is None else verdict.skip)
        self._track(None if verdict is None else verdict.to_host(), suspects)
        return StepResult(loss.detach(), map_tensors(Tensor.detach, output), batch)

    def _track(self, report: Tensor | None, suspects: list[Suspect]) -> None:
        done = torch.cuda.Event()
        done.record()
        self._in_flight.append(_InFlight(done, report, suspects))

    def _finish_oldest(self) -> None:
        """Wait for the oldest step in flight, and raise where it was skipped."""
        oldest = self._in_flight[0]
        if not _wait(oldest.done, time.monotonic() + self.timeout_seconds):
            if ranks.world_size() > 1:
                end_within(_GRACE_SECONDS)
            raise TimeoutError(
                f"the GPU has not finished a step in {self.timeout_seconds:g} s; where several "
                "ranks train, look for one that died or is stuck"
            )
        self._in_flight.popleft()
        self._check_push()
        if oldest.report is not None:
            skip, *found = oldest.report.tolist()
            raise_for(skip, found, oldest.suspects)

    def _check_push(self) -> None:
        """Raise where a GPU waited in vain for another one's vectors or gradients."""
        try:
            for domain in self._push_domains:
                domain.check()
        except TimeoutError:
            end_within(_GRACE_SECONDS)
            raise


def _never() -> bool:
    return False


def _group_of(model: nn.Module) -> Any:
    """The ranks that train ``model`` together: those over which its tables are sharded, else all;
    None where there is one."""
    for module in model.modules():
        if isinstance(module, ShardedCollection):
            return module._ranks.group
    return dist.group.WORLD if ranks.world_size() > 1 else None


def _push_domains_of(model: nn.Module) -> list[PushDomain]:
    """Where the GPUs that train ``model`` store into each other's memory."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedCollection)]
    return list(dict.fromkeys(m._ranks.push for m in sharded if m._ranks.push is not None))


def _reason(error: Exception | None) -> str:
    """The first of the errors that led to ``error``."""
    if error is None:
        return "another rank failed, whose warning says why"
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    lines = str(first).splitlines()
    return f"{type(first).__name__}: {lines[0] if lines else ''}"


def _wait(done: torch.cuda.Event, deadline: float) -> bool:
    """Whether ``done`` comes before the ``deadline`` of the monotonic clock."""
    while not done.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
