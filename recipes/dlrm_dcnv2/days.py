"""Training day after day: each file of a log once, in turn, and after each an export."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from recipes.dlrm_dcnv2.resumable import ResumableTraining
from torchembed.checkpoints import DeltaFolder
from torchembed.data import BackgroundLoader, BatchSource
from torchembed.data.criteo_text import text_files
from torchembed.data.data_path import DataPath, data_path
from torchembed.data.mlperf import mlperf_days
from torchembed.data.parquet import parquet_files
from torchembed.training import (
    DiskReadAhead,
    Epochs,
    MetricsWriter,
    Progress,
    StopSignal,
    evaluate,
)

EXPORTS = "exports"


def day_files(data: DataPath | str) -> list[DataPath]:
    """The files to train on, in order: all of the folder ``data`` but the last, which is held out.

    Raises:
        FileNotFoundError: where there is nothing to read.
        ValueError: where there are fewer than two, or they are MLPerf's.
    """
    path = data_path(data)
    if path.is_dir() and mlperf_days(path):
        raise ValueError(
            f"data must be days of text or Parquet files to be trained daily, and {path} holds "
            "MLPerf's files; train on these without daily"
        )
    is_parquet = path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))
    files = parquet_files(path) if is_parquet else text_files(path)
    if len(files) < 2:
        raise ValueError(
            f"data must be a folder of at least two files to be trained daily, one of them held "
            f"out, got {path} with {len(files)}; add the days, or leave daily out"
        )
    return files[:-1]


class DaysDone:
    """The days that are trained, and the position in the one that is not."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """The names of the files of the days that are trained."""
        self.epochs: Epochs | None = None
        """Over the next day's file, once it was begun."""
        self._position: dict[str, Any] | None = None

    def begin(self, batches: BackgroundLoader) -> Epochs:
        """Go through the next day's batches, from the position that was loaded on."""
        self.epochs = Epochs(batches)
        if self._position is not None:
            self.epochs.load_state_dict(self._position)
            self._position = None
        return self.epochs

    def end(self, name: str) -> None:
        """Note the day as trained."""
        self.names, self.epochs = [*self.names, name], None

    def check(self, names: Sequence[str]) -> None:
        """Raise ``ValueError`` where other files than ``names``, in order, were trained."""
        if list(names[: len(self.names)]) != self.names:
            raise ValueError(
                f"data must begin with the days that the run has trained, {self.names}, where it "
                f"goes on, got {list(names)}; add later days alone, or begin another run"
            )

    def state_dict(self) -> dict[str, Any]:
        position = self._position if self.epochs is None else self.epochs.state_dict()
        return {"names": self.names, "position": position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.names, self._position = list(state_dict["names"]), state_dict["position"]
        self.epochs = None


@dataclasses.dataclass(kw_only=True)
class DailyLoop(ResumableTraining):
    """One training over the files of a log, from the first or from where its checkpoint is; files
    that came to the folder since then are trained, too."""

    files: Sequence[DataPath]
    """To be trained, in order."""
    open_day: Callable[[DataPath], BatchSource]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.days, self.exports = DaysDone(), DeltaFolder(self.output / EXPORTS)
        self.load(days=self.days)
        self.days.check([file.name for file in self.files])

    def run(self) -> bool:
        """Train to the end of the last file; False where a signal ended it before, once that is
        saved."""
        with (
            StopSignal() as stop,
            Progress(done=self.history.num_steps) as progress,
            self.metrics_writer() as metrics,
            self.pipeline,
            DiskReadAhead(self.model) as ahead,
        ):
            for file in self.files[len(self.days.names) :]:
                source, num_ahead = self.open_day(file), self.config.read_ahead
                with BackgroundLoader(source, num_ahead=num_ahead, announce=ahead) as loader:
                    epochs = self.days.begin(loader)
                    while not epochs.is_done and not stop.is_agreed:
                        max_steps = self._steps_until_due()
                        self.train(epochs, progress, metrics, stop, max_steps=max_steps)
                        if not epochs.is_done:
                            self.checkpoints.save(
                                self.history.num_steps, self.state, wait=stop.is_agreed
                            )
                if stop.is_agreed and not epochs.is_done:
                    progress.note(f"step {self.history.num_steps}: saved, and stopped by a signal")
                    break
                self._end_day(file, progress, metrics)
                if stop.is_agreed:
                    break
            self.checkpoints.wait()
        return len(self.days.names) == len(self.files)

    def _steps_until_due(self) -> int | None:
        every = self.config.checkpoint_every
        return None if every is None else every - self.history.num_steps % every

    def _end_day(self, file: DataPath, progress: Progress, metrics: MetricsWriter) -> None:
        """Evaluate, export and save what a whole day has trained."""
        step, number = self.history.num_steps, len(self.days.names)
        with self.config.precision.context(self.pipeline.device):
            now = evaluate(self.model, self.validation)
        self.add_evaluation(now, metrics)
        is_whole = self.exports.export(self.model, number)
        kind = "whole" if is_whole else "what has changed"
        progress.note(
            f"step {step}: {file.name} trained, validation AUC {now.auc:.5f}, log loss "
            f"{now.logloss:.4f}; export {number} is {kind}"
        )
        self.days.end(file.name)
        self.checkpoints.save(step, self.state)
