"""``train``: the loop around a pipeline's steps."""

import math
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from torchembed.core.ranks import any_rank
from torchembed.core.ranks.collective_errors import raise_on_all_ranks
from torchembed.modules.model_statistics import ModelStatistics, shares_statistics
from torchembed.step.pipeline import TrainPipeline
from torchembed.training.batches import in_step
from torchembed.training.history import History
from torchembed.training.metrics import MetricsWriter
from torchembed.training.progress import Progress
from torchembed.training.stop import StopSignal
from torchembed.training.table_sizes import check_table_sizes


def train(
    pipeline: TrainPipeline,
    batches: Iterable[object],
    *,
    schedulers: Sequence[LRScheduler] = (),
    max_steps: int | None = None,
    history: History | None = None,
    progress: Progress | None = None,
    metrics: MetricsWriter | None = None,
    stop: StopSignal | None = None,
) -> History:
    """Train a pipeline's model on every batch of all ranks; collective.

    All ranks take the same number of steps: a rank with fewer batches continues with empty ones
    until the last rank is done. Each rank's loss is the mean over its own samples, and gradients
    are the mean over ranks, as in DDP, if the model averages them, as ``shard_embeddings`` has it
    do. So a rank with fewer samples weighs as much as the others, and an empty one adds zero.

    A model in evaluation mode is set to training mode. If the model is in training mode, modules in
    evaluation mode, such as a frozen batch norm, stay so.

    Args:
        pipeline: takes the steps. It has trained every batch it read when this
            returns, so further calls may use it.
        batches: any iterable of what :meth:`TrainPipeline.progress` takes, as for :func:`in_step`;
            at most ``max_steps`` batches are taken from an iterator or
            from ``Epochs``, so a later call continues from there.
        schedulers: learning-rate schedulers, stepped after each step.
        max_steps: most steps to take, the same on every rank; None for no limit.
        history: the history to continue; a new one by default.
        progress: advanced at each step.
        metrics: a writer that gets, whenever the loss is read, the loss, the learning rate of the
            first optimizer, the samples a second since the previous reading, the statistics of
            dynamic tables, as ``item/size`` for the whole table ``item``, and those of caches of
            tables in host memory, as ``users.cache/hit_rate`` for the model's module ``users``,
            added up over its caches and all ranks. Ranks other than the first may pass None.
        stop: once a rank is asked to stop, all ranks end after the steps whose batches they have
            read. If that is before ``max_steps``, the loss is not read, so that a run that
            continues, also from a checkpoint, has the same points as one without a stop.

    Returns:
        ``history``, or the new one.

    Raises:
        FloatingPointError: if the loss is not finite, when it is next read.
        IndexError, TimeoutError: as the pipeline does.
        ValueError, RuntimeError: as for :func:`in_step`. Also ``ValueError``, before a step, if
            ``batches`` come from a ``BatchSource`` whose ``table_sizes`` exceed the rows of a
            static table that raises for bad ids.
    """
    if not hasattr(pipeline, "take_up_changes"):
        raise TypeError(
            f"pipeline must be a TrainPipeline, got {type(pipeline).__name__}; make one by "
            "TrainPipeline(model, loss_fn, optimizers)"
        )
    history = History() if history is None else history
    if not pipeline.model.training:
        pipeline.model.train()
    raise_on_all_ranks(
        lambda: check_table_sizes(pipeline.model, batches), "compare tables with the batches"
    )
    pipeline.take_up_changes()
    meter, num_before = _Meter(history, progress, metrics, pipeline.model), history.num_steps
    ready = in_step(batches, None, max_steps, stop, pipeline.convert)
    while True:
        try:
            result = pipeline.progress(ready)
        except StopIteration:
            break
        meter.add_step(result.peek_loss(), result.num_samples, pipeline.optimizers)
        for scheduler in schedulers:
            scheduler.step()
    is_cut_short = stop is not None and stop.is_agreed
    meter.read_begun()
    if not is_cut_short or history.num_steps - num_before == max_steps:
        meter.read_rest()
    meter.take_time()
    return history


class _Meter:
    """Adds steps to the history, and reports its new points to progress bar and metrics."""

    def __init__(
        self,
        history: History,
        progress: Progress | None,
        metrics: MetricsWriter | None,
        model: nn.Module,
    ) -> None:
        self.history, self.progress, self.metrics = history, progress, metrics
        self._model = model
        self._since, self._num_samples = time.perf_counter(), history.num_samples
        self._lr: float | Tensor = math.nan
        self._lr_at: dict[int, float | Tensor] = {}
        """Learning rates of steps whose loss is not read yet."""
        self._statistics_at: dict[int, ModelStatistics] = {}
        """Statistics of tables as of such steps, on their way to the host."""
        self._reads_statistics = metrics is not None
        if shares_statistics(model):
            # Each reading is collective, and one rank alone may write.
            self._reads_statistics = any_rank(self._reads_statistics)

    def add_step(
        self, loss: Tensor, batch_size: int, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        step, every = self.history.num_steps + 1, self.history.read_loss_every
        if self.metrics is not None and optimizers:
            lr = optimizers[0].param_groups[0]["lr"]
            # Schedulers change a tensor in place.
            self._lr = lr.clone() if isinstance(lr, Tensor) else lr
            if step % every == 0:
                self._lr_at[step] = self._lr
        if self._reads_statistics and step % every == 0:
            self._statistics_at[step] = ModelStatistics(self._model)
        num_points = len(self.history.losses)
        self.history.add_step(loss, batch_size)
        if self.progress is not None:
            self.progress.advance()
        self._report(num_points)

    def read_begun(self) -> None:
        num_points = len(self.history.losses)
        self.history.read_begun()
        self._report(num_points)

    def read_rest(self) -> None:
        num_points = len(self.history.losses)
        self.history.read_loss()
        self._report(num_points)

    def take_time(self) -> float:
        seconds = time.perf_counter() - self._since
        self.history.seconds += seconds
        self._since += seconds
        return seconds

    def _report(self, num_known: int) -> None:
        """Report the points after the first ``num_known``."""
        points = self.history.losses[num_known:]
        if not points:
            return
        seconds = self.take_time()
        num_samples = self.history.num_samples - self._num_samples
        self._num_samples = self.history.num_samples
        for point in points:
            if self.progress is not None:
                self.progress.show(loss=point.loss)
            statistics = self._statistics_of(point.step) if self._reads_statistics else {}
            if self.metrics is not None:
                self.metrics.write(
                    point.step,
                    loss=point.loss,
                    lr=float(self._lr_at.pop(point.step, self._lr)),
                    samples_per_second=num_samples / seconds,
                    **statistics,
                )

    def _statistics_of(self, step: int) -> dict[str, float]:
        # Where the history holds what the steps before this call left, the figures are of now.
        return (self._statistics_at.pop(step, None) or ModelStatistics(self._model)).scalars()
