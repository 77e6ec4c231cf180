"""Steps, evaluations and checkpoints in their turns, until the run ends or is to stop."""

import dataclasses

from recipes.dlrm_dcnv2.resumable import ResumableTraining
from recipes.mlperf_log import MlperfLog
from torchembed.data import BackgroundLoader
from torchembed.training import (
    CheckpointFolder,
    Epochs,
    MetricsWriter,
    Progress,
    StopSignal,
    TrainingRun,
    evaluate,
)


@dataclasses.dataclass(kw_only=True)
class TrainLoop(ResumableTraining):
    """One training, from its first step or from its newest checkpoint."""

    loader: BackgroundLoader
    steps_per_epoch: int | None
    """None where the data does not know its number of rows beforehand."""
    mlperf_log: MlperfLog | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = Epochs(self.loader, self.config.epochs)
        self.early_stop = self.config.early_stop()
        self.best = CheckpointFolder(self.output / "best", keep=1)
        self._saved_step = self.load(epochs=self.epochs, early_stop=self.early_stop)
        if self.has_best and not self.best.steps():
            raise ValueError(
                "keep_best must be given where a run begins, and this one did not keep the model "
                f"of its best evaluation, after step {self.early_stop.best_step}; leave it out, or "
                "begin another run"
            )
        self._check_optimizers()

    @property
    def has_best(self) -> bool:
        """True where the best model is kept, which there is once an evaluation has an AUC."""
        return self.config.keep_best and self.early_stop.best_auc is not None

    def _check_optimizers(self) -> None:
        """They have what the checkpoint says, whatever the config does."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for name, key in (("learning_rate", "initial_lr"), ("eps", "eps")):
                wanted, found = getattr(self.config, name), float(group[key])
                if wanted != found:
                    raise ValueError(
                        f"{name} must stay as it was where a run goes on, {found}, got {wanted}; "
                        "begin another run for it"
                    )

    @property
    def is_done(self) -> bool:
        """True once there is nothing left to train."""
        most = self.config.max_steps
        return (
            self.epochs.is_done
            or self.early_stop.reason is not None
            or (most is not None and self.history.num_steps >= most)
        )

    def run(self) -> bool:
        """Train to the end and save; False where a signal ended it before, once that is saved."""
        every = self.config.evaluate_every, self.config.checkpoint_every
        with (
            StopSignal() as stop,
            Progress(self._num_steps(), done=self.history.num_steps) as progress,
            self.metrics_writer() as metrics,
            self.pipeline,
        ):
            if self._saved_step is not None:
                progress.note(f"step {self._saved_step}: goes on from its checkpoint")
            if self.mlperf_log is not None:
                self.mlperf_log.start_run(self._epoch())
            # New limits may end a run, or have it evaluated, at the step at which a signal left
            # losses unread.
            if (self.is_done or self._is_due(every[0])) and self.history.read_loss():
                metrics.write(self.history.num_steps, loss=self.history.losses[-1].loss)
            while not stop.is_agreed:
                evaluate_is_due, checkpoint_is_due = map(self._is_due, every)
                if (evaluate_is_due or self.is_done) and not self._is_evaluated():
                    self._evaluate(progress, metrics, stop)
                if stop.is_agreed:
                    break
                if checkpoint_is_due or self.is_done:
                    self._save(wait=self.is_done)
                if self.is_done:
                    break
                max_steps = self._steps_until_due()
                self.train(self.epochs, progress, metrics, stop, max_steps=max_steps)
            if stop.is_agreed:
                self._save(wait=True)
                progress.note(f"step {self.history.num_steps}: saved, and stopped by a signal")
        if self.mlperf_log is not None:
            is_short = self.config.target_auc is not None and not self.early_stop.has_reached_target
            self.mlperf_log.stop_run(self._epoch(), is_success=self.is_done and not is_short)
        return not stop.is_agreed

    def _num_steps(self) -> int | None:
        known = self.steps_per_epoch
        counts = (None if known is None else known * self.config.epochs, self.config.max_steps)
        return min((count for count in counts if count is not None), default=None)

    def _is_due(self, every: int | None) -> bool:
        num_steps = self.history.num_steps
        return every is not None and num_steps > 0 and num_steps % every == 0

    def _steps_until_due(self) -> int | None:
        """Until the next evaluation, checkpoint or the last step."""
        done, config = self.history.num_steps, self.config
        left = [
            every - done % every
            for every in (config.evaluate_every, config.checkpoint_every)
            if every is not None
        ]
        if config.max_steps is not None:
            left.append(config.max_steps - done)
        return min(left, default=None)

    def _is_evaluated(self) -> bool:
        held_out = self.history.held_out
        return bool(held_out) and held_out[-1].step == self.history.num_steps

    def _evaluate(self, progress: Progress, metrics: MetricsWriter, stop: StopSignal) -> None:
        """Not to the end where a signal comes: the run that goes on does it again."""
        if self.mlperf_log is not None:
            self.mlperf_log.start_evaluation(self._epoch())
        with self.config.precision.context(self.pipeline.device):
            now = evaluate(self.model, self.validation, stop=stop)
        if now is None:
            return
        if self.mlperf_log is not None:
            self.mlperf_log.stop_evaluation(self._epoch(), now.auc)
        step = self.history.num_steps
        self.add_evaluation(now, metrics)
        self._saved_step = None  # what may be saved of this step lacks it
        progress.note(
            f"step {step}: training loss {self.history.losses[-1].loss:.4f}, "
            f"validation AUC {now.auc:.5f}, log loss {now.logloss:.4f}"
        )
        if self.early_stop.update(step, now.auc) and self.config.keep_best:
            self.best.save(step, TrainingRun(model=self.model, optimizers=self.optimizers))
        if self.early_stop.reason is not None:
            progress.note(f"step {step}: stopped, {self.early_stop.reason}")

    def _save(self, *, wait: bool) -> None:
        if self._saved_step != self.history.num_steps:
            self.checkpoints.save(self.history.num_steps, self.state, wait=wait)
            self._saved_step = self.history.num_steps
        if wait:
            self.checkpoints.wait()

    def _epoch(self) -> float:
        """Passes over the training rows so far."""
        if not self.steps_per_epoch:
            return float(self.epochs.epoch)
        return round(self.history.num_steps / self.steps_per_epoch, 6)
