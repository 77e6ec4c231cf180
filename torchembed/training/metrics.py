"""Writes a run's metrics as JSON lines and TensorBoard events."""

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torchembed.core.ranks import rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends JSON lines to ``metrics.jsonl`` in ``folder`` on rank 0; other ranks write nothing.

    A line is flushed to the system when :meth:`write` returns.

    Args:
        folder: the run's folder, which must exist.
        tensorboard: whether to write event files into ``folder/tensorboard`` too.
        after_step: the step that the run continues from; lines of later steps, and an incomplete
            last line, are removed.

    Raises:
        ImportError: if ``tensorboard`` is asked for and not installed.
    """

    def __init__(
        self, folder: Path | str, *, tensorboard: bool = False, after_step: int = 0
    ) -> None:
        # Imported on every rank: were it missing, rank 0 would end and the others wait for it.
        make_events = _summary_writer() if tensorboard else None
        self._file, self._events = None, None
        if rank() != 0:
            return
        folder = Path(folder)
        path = folder / METRICS_FILE
        if path.exists():
            _cut(path, after_step)
        self._file = path.open("a")
        if make_events is not None:
            self._events = make_events(str(folder / "tensorboard"), purge_step=after_step + 1)

    def write(self, step: int, **values: float) -> None:
        """Write ``values`` for ``step`` with the time in seconds since 1970; NaN and infinite ones
        become null. They are numbers, also numpy's, or tensors of one element."""
        if self._file is None:
            return
        now = time.time()
        known = {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = {"step": step, "time": round(now, 3), **known}
        # Numbers of numpy and tensors of one element are none that JSON knows.
        self._file.write(json.dumps(line, default=float) + "\n")
        self._file.flush()
        if self._events is not None:
            for key, value in values.items():
                self._events.add_scalar(key, value, step, now)
            self._events.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file, self._events = None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl`` in ``folder``, without an incomplete last one; numbers
    that were not finite are None."""
    lines = (folder / METRICS_FILE).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _cut(path: Path, after_step: int) -> None:
    kept = [line for line in read_metrics(path.parent) if line["step"] <= after_step]
    shortened = path.with_name(f"{path.name}.partial")
    shortened.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(shortened, path)


def _summary_writer() -> "type[SummaryWriter]":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard=True needs the package tensorboard, and it cannot be imported ({error}); "
            "pip install tensorboard, or leave it out"
        ) from error
    return SummaryWriter
