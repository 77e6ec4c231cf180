"""Progress bar on rank 0."""

import sys
from types import TracebackType
from typing import Self

from torchembed.core.ranks import rank


class Progress:
    """Bar of steps on rank 0's standard error; other ranks show nothing.

    Args:
        total: steps of the whole run, where known.
        label: text before the bar.
        done: steps that were taken before.
    """

    def __init__(self, total: int | None = None, label: str = "train", done: int = 0) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total,
            initial=done,
            desc=label,
            unit="step",
            disable=rank() != 0,
            file=sys.stderr,
            mininterval=1.0,
            dynamic_ncols=True,
        )
        self._shown: dict[str, str] = {}

    def advance(self) -> None:
        """Count one step."""
        self._bar.update()

    def show(self, **values: float) -> None:
        """Show ``name=value`` after the bar, until the name is shown again."""
        self._shown |= {name: f"{value:.4f}" for name, value in values.items()}
        self._bar.set_postfix(self._shown, refresh=False)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
