"""A folder of checkpoints: which are complete, how one is completed, which are kept."""

import atexit
import datetime
import re
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torchembed.checkpoints.marker import Marker
from torchembed.checkpoints.rank_files import (
    CheckpointReader,
    CheckpointWriter,
    in_threads,
)
from torchembed.checkpoints.run_state import (
    SavedState,
    check_agreement,
    load_state,
    on_cpu,
    state_of,
)
from torchembed.checkpoints.state_files import read_state, write_state
from torchembed.checkpoints.storage import FileDigest, Storage
from torchembed.checkpoints.training_run import TrainingRun
from torchembed.core import ranks
from torchembed.core.collective_errors import decide_on_first_rank, raise_on_all_ranks
from torchembed.core.cpu_group import CpuGroup

MARKER = "complete.json"
"""Of a checkpoint's files the last one; there is no checkpoint without it."""
UNFINISHED_MARKER = f"{MARKER}.partial"
_DATA_FILE = re.compile(r"__(\d+)_")
"""Of the rank of this number."""
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")


class _Checkpoint(NamedTuple):
    """A folder in the folder, complete or not."""

    step: int
    attempt: int
    """Tells it from an older one of the same step."""

    @property
    def name(self) -> str:
        return f"step-{self.step:09d}" + (f"-{self.attempt}" if self.attempt else "")

    @classmethod
    def of(cls, name: str) -> "_Checkpoint | None":
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2] or 0))


class CheckpointFolder:
    """Saves checkpoints of a run, keeps the newest, and finds the last complete one again.

    A checkpoint is a folder ``step-<step>`` that counts only once a file ``complete.json`` stands
    in it. That file is put there last, in one atomic step, so a save that dies at any point leaves
    the checkpoints before it as they were. What remains of such a save is removed by the next one.

    Every rank makes one, of a folder that all of them see. One run at a time may save there. The
    newest checkpoint is that of the highest step, so a run that begins anew, or goes on from an
    earlier step than the last, saves in another folder.
    """

    def __init__(
        self, path: str | Path, *, keep: int = 2, timeout: datetime.timedelta | None = None
    ) -> None:
        """
        Args:
            path: a local folder or a URL that fsspec knows (``s3://``, ``hdfs://``, ...); made by
                the first save.
            keep: how many complete checkpoints are left after a save, at least 1.
            timeout: how long a rank waits for the others, which may take longer to write their
                files; the default process group's limit where None.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._storage = Storage(path)
        self._keep = keep
        self._timeout = timeout
        self._group: CpuGroup | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def __str__(self) -> str:
        return self._storage.url

    def steps(self) -> list[int]:
        """Of the complete checkpoints, ascending."""
        return sorted({checkpoint.step for checkpoint in self._complete()})

    def _found(self) -> list[_Checkpoint]:
        """Everything that a save left, oldest first."""
        return sorted(filter(None, map(_Checkpoint.of, self._storage.names())))

    def _is_complete(self, checkpoint: _Checkpoint) -> bool:
        return self._storage.exists(self._storage.path(checkpoint.name, MARKER))

    def _complete(self) -> list[_Checkpoint]:
        return [checkpoint for checkpoint in self._found() if self._is_complete(checkpoint)]

    def _cpu_group(self, what: str) -> CpuGroup:
        """All ranks, through the CPU, apart from what the run itself sends; made once."""
        if self._group is None:
            self._group = CpuGroup(what, self._timeout)
        return self._group

    def save(self, step: int, run: TrainingRun, *, wait: bool = True) -> None:
        """Write the state of ``run`` after ``step`` steps, then remove what need not be kept.

        A rank writes several files at once. Of a state on a GPU each of these threads holds some
        megabytes on the CPU at a time; of one on the CPU nothing is copied.

        Waits for an earlier save first, and raises what that one raised. A checkpoint of the same
        step is replaced. Collective.

        Args:
            wait: return once the checkpoint is complete. Otherwise the state is copied to the CPU,
                which must have room for it, and a thread writes the copy while training goes on;
                :meth:`wait` must be called before the process group is destroyed.

        Raises:
            OSError, RuntimeError: where writing fails, on every rank.
            TimeoutError, ConnectionError: where ranks did not come; names them. This object is of
                no use then: end the run, or make another one on every rank.
            ValueError: where an optimizer holds parameters that are not the model's, the ranks'
                steps or optimizers differ, or ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        self.wait()
        what = f"save a checkpoint of step {step} in {self}"
        group = self._cpu_group(what)
        check_agreement(step, run, group, what)
        state = raise_on_all_ranks(lambda: state_of(run), what, group)
        if wait:
            self._write(step, state, group, what)
            return
        copied = raise_on_all_ranks(lambda: on_cpu(state), what, group)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            atexit.register(self.wait)  # a failure that nobody asked for is shown at the end
        self._pending = self._writer.submit(self._write, step, copied, group, what)

    def wait(self) -> None:
        """Return once an asynchronous save is complete, and raise what it raised. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, state: dict[str, Any], group: CpuGroup, what: str) -> None:
        checkpoint, token = decide_on_first_rank(lambda: self._begin(step), what, group)
        path = self._storage.path(checkpoint.name)
        raise_on_all_ranks(lambda: self._check_token(path, token), what, group)
        self._storage.written.clear()
        write_state(state, CheckpointWriter(self._storage, path), group, what)
        written = group.gather(self._storage.written, what)
        files = {name.rsplit("/", 1)[-1]: d for part in written for name, d in part.items()}
        decide_on_first_rank(lambda: self._complete_one(step, path, token, files), what, group)
        decide_on_first_rank(lambda: self._remove_old(checkpoint), what, group)

    def _begin(self, step: int) -> tuple[_Checkpoint, str]:
        """Make the folder of a new checkpoint, with a token that the other ranks must see there."""
        attempts = []
        for found in self._found():
            if found.step == step:
                # Of what is removed too: another run might still be writing there.
                attempts.append(found.attempt)
            if not self._is_complete(found):
                self._storage.remove(self._storage.path(found.name))
        checkpoint = _Checkpoint(step, max(attempts, default=-1) + 1)
        token = secrets.token_hex(8)
        path = self._storage.path(checkpoint.name)
        self._storage.mkdir(path)
        self._storage.write(f"{path}/{UNFINISHED_MARKER}", token.encode())
        return checkpoint, token

    def _has_token(self, path: str, token: str) -> bool:
        try:
            return self._storage.read(f"{path}/{UNFINISHED_MARKER}") == token.encode()
        except FileNotFoundError:
            return False

    def _check_token(self, path: str, token: str) -> None:
        if not self._has_token(path, token):
            raise ValueError(
                f"path must be one folder that all ranks see, and rank {ranks.rank()} does not see "
                f"in {self} what rank 0 wrote there"
            )

    def _complete_one(self, step: int, path: str, token: str, files: dict[str, FileDigest]) -> None:
        if not self._has_token(path, token):
            raise RuntimeError(
                f"one run at a time may save in {self}, and another one has removed or replaced "
                f"{path} while it was written; end one of them, or give it another folder"
            )
        unfinished = f"{path}/{UNFINISHED_MARKER}"
        self._storage.write(unfinished, Marker(step, ranks.world_size(), files).to_bytes())
        self._storage.rename(unfinished, f"{path}/{MARKER}")

    def _remove_old(self, newest: _Checkpoint) -> None:
        """All but the newest; of one step, and of a run that went on from an earlier one, what was
        written last is the newest."""
        complete = self._complete()
        latest = {checkpoint.step: checkpoint for checkpoint in complete}
        kept = set(list(latest.values())[-self._keep :]) | {newest}
        for checkpoint in complete:
            if checkpoint not in kept:
                path = self._storage.path(checkpoint.name)
                self._storage.remove(f"{path}/{MARKER}")
                self._storage.remove(path)

    def load(self, run: TrainingRun, step: int | None = None) -> int | None:
        """Read the newest complete checkpoint, or the one of ``step``, into ``run`` in place.

        The number of ranks and the placement of tables may differ from those that saved. What
        belongs to a rank comes back to it where as many ranks load as saved. Otherwise
        ``run.others`` take what rank 0 saved, and random generators stay as they are. They also do
        where the run has neither optimizers nor others: such a run does not go on training.

        A run without optimizers takes the model, and its ``others``, of any checkpoint. Others that
        were saved and are not in ``run`` are passed over. Collective. A checkpoint is unpickled in
        part: load only what you trust.

        Returns:
            The step, or None where there is no complete checkpoint and none was asked for.

        Raises:
            FileNotFoundError: where there is none of ``step``, or a file of it is missing.
            ValueError: where a file is not as it was written, or the checkpoint is of another model
                or run, with all mismatches. Nothing is changed in either case.
        """
        self.wait()
        what = f"load a checkpoint of {self}"
        group = self._cpu_group(what)
        checkpoint = decide_on_first_rank(lambda: self._choose(step), what, group)
        if checkpoint is None:
            return None
        path = self._storage.path(checkpoint.name)
        written = decide_on_first_rank(lambda: self._storage.read(f"{path}/{MARKER}"), what, group)
        marker = raise_on_all_ranks(lambda: self._read_marker(path, written), what, group)
        raise_on_all_ranks(lambda: self._check_files(path, marker.files), what, group)
        reader = CheckpointReader(self._storage, path)
        metadata = raise_on_all_ranks(reader.read_metadata, what, group)

        saved = SavedState(
            name=f"checkpoint {path}",
            entries=metadata.state_dict_metadata,
            num_ranks=marker.num_ranks,
            read=lambda state: read_state(state, reader, metadata, group, what),
            group=group,
        )
        load_state(run, saved)
        return checkpoint.step

    def _choose(self, step: int | None) -> _Checkpoint | None:
        complete = self._complete()
        if step is None:
            return complete[-1] if complete else None
        of_step = [checkpoint for checkpoint in complete if checkpoint.step == step]
        if not of_step:
            raise FileNotFoundError(
                f"{self} holds no complete checkpoint of step {step}; it has those of steps "
                f"{self.steps()}"
            )
        return of_step[-1]

    def _read_marker(self, path: str, seen_by_first: bytes) -> Marker:
        try:
            seen = self._storage.read(f"{path}/{MARKER}")
        except FileNotFoundError:
            seen = b""
        if seen != seen_by_first:
            raise ValueError(
                f"path must be one folder that all ranks see, and rank {ranks.rank()} does not see "
                f"the {path}/{MARKER} that rank 0 sees"
            )
        try:
            return Marker.parse(seen)
        except ValueError as error:
            raise ValueError(
                f"file {path}/{MARKER} is corrupt: load an earlier step ({error})"
            ) from None

    def _check_files(self, path: str, files: dict[str, FileDigest]) -> None:
        """Each rank reads a share of them whole, before anything is loaded."""

        def check(name: str) -> None:
            file = f"{path}/{name}"
            if not self._storage.exists(file):
                raise FileNotFoundError(f"checkpoint {path} lacks its file {name}")
            wanted, found = files[name], self._storage.digest(file)
            if found != wanted:
                raise ValueError(
                    f"file {file} must have {wanted.num_bytes} bytes and CRC-32 {wanted.crc32:08x} "
                    f"as it was written, got {found.num_bytes} and {found.crc32:08x}; it is "
                    "corrupt: load an earlier step"
                )

        in_threads(check, [name for name in sorted(files) if _checker(name) == ranks.rank()])


def _checker(name: str) -> int:
    """The rank that checks a file: where it can, the one that wrote it, and is likely to load it
    next, from its machine's memory."""
    writer = _DATA_FILE.match(name)
    return int(writer[1]) % ranks.world_size() if writer else 0
