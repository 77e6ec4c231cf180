"""The checkpoints in a folder: which are complete, and which are to be kept."""

import re
from typing import NamedTuple

from torchembed.checkpoints.files.storage import Storage

MARKER_FILE = "complete.json"
"""Last file of a checkpoint; without it there is no checkpoint."""
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")


class CheckpointName(NamedTuple):
    """Name of a checkpoint's folder; names are ordered from old to new."""

    step: int
    attempt: int
    """Counts the saves of one step, from 0."""

    def __str__(self) -> str:
        return f"step-{self.step:09d}" + (f"-{self.attempt}" if self.attempt else "")

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """The name that ``text`` is; None for other files in the folder."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(int(found[1]), int(found[2] or 0))


class FolderContents:
    """Lists and removes the checkpoints in a folder; asks the storage anew in each call."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted({checkpoint.step for checkpoint in self._complete()})

    def choose(self, step: int | None) -> CheckpointName | None:
        """The newest complete checkpoint, or the newest of ``step``; None where there is none.

        Raises:
            FileNotFoundError: if there is none of ``step``.
        """
        complete = self._complete()
        if step is None:
            return complete[-1] if complete else None
        of_step = [checkpoint for checkpoint in complete if checkpoint.step == step]
        if not of_step:
            raise FileNotFoundError(
                f"{self._storage.url} holds no complete checkpoint of step {step}; it has those of "
                f"steps {self.steps()}"
            )
        return of_step[-1]

    def begin(self, step: int) -> CheckpointName:
        """Remove what saves left that were not completed, and name a new checkpoint."""
        attempts = []
        for found in self._found():
            if found.step == step:
                # An unfinished attempt counts too, although it is removed: another process might
                # still be writing there, and must not write into the new folder.
                attempts.append(found.attempt)
            if not self._is_complete(found):
                self._storage.remove(self._storage.path(str(found)))
        return CheckpointName(step, max(attempts, default=-1) + 1)

    def remove_old(self, newest: CheckpointName, keep: int) -> None:
        """Remove all but ``newest`` and the ``keep`` highest steps, of each the last attempt.

        ``newest`` may have a lower step than others, where a run went on from an earlier one.
        """
        complete = self._complete()
        latest = {checkpoint.step: checkpoint for checkpoint in complete}
        kept = set(list(latest.values())[-keep:]) | {newest}
        for checkpoint in complete:
            if checkpoint not in kept:
                path = self._storage.path(str(checkpoint))
                # The marker goes first: a removal that is interrupted leaves an unfinished
                # checkpoint and no damaged one.
                self._storage.remove(f"{path}/{MARKER_FILE}")
                self._storage.remove(path)

    def _found(self) -> list[CheckpointName]:
        """Everything that saves left, oldest first."""
        return sorted(filter(None, map(CheckpointName.parse, self._storage.names())))

    def _is_complete(self, checkpoint: CheckpointName) -> bool:
        return self._storage.exists(self._storage.path(str(checkpoint), MARKER_FILE))

    def _complete(self) -> list[CheckpointName]:
        return [checkpoint for checkpoint in self._found() if self._is_complete(checkpoint)]
