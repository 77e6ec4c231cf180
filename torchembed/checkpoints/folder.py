"""A folder of checkpoints: how they are saved, completed, checked and loaded."""

import atexit
import contextlib
import datetime
import logging
import numbers
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint.stateful import Stateful

from torchembed.checkpoints.files.atomic_folder import AtomicFolder
from torchembed.checkpoints.files.database_files import DatabaseFolders
from torchembed.checkpoints.files.in_threads import in_threads
from torchembed.checkpoints.files.rank_files import (
    CheckpointReader,
    CheckpointWriter,
)
from torchembed.checkpoints.files.storage import FileDigest, Storage
from torchembed.checkpoints.folder_contents import MARKER_FILE, CheckpointName, FolderContents
from torchembed.checkpoints.marker import Marker
from torchembed.checkpoints.run.run_databases import RunDatabases
from torchembed.checkpoints.run.run_state import (
    check_agreement,
    load_others,
    load_state,
    on_cpu,
    state_of,
)
from torchembed.checkpoints.run.saved_state import SavedState
from torchembed.checkpoints.run.saved_tensors import SavedTensors
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.checkpoints.state_files import read_state, write_state
from torchembed.checkpoints.writer_claim import WriterClaim, claim_of
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import decide_on_first_rank, raise_on_all_ranks
from torchembed.core.ranks.cpu_group import CpuGroup

_logger = logging.getLogger(__name__)

_DATA_FILE = re.compile(r"__(\d+)_")
"""Name of a file of the rank of this number."""


class CheckpointFolder:
    """Saves checkpoints of a run into a folder, keeps the newest, and loads the last complete one.

    A checkpoint is a folder ``step-<step>``, and is complete once it has a file ``complete.json``,
    which is written last, in one atomic step. So a save that dies at any point leaves the earlier
    checkpoints as they were; the next save removes what remains of it.

    Every rank makes a ``CheckpointFolder`` of the same folder, which all ranks must see. One run at
    a time may save there: from its first save, or :meth:`claim`, the folder belongs to the process
    of rank 0 until that ends or calls :meth:`close`, and other processes get an error that names
    it. (Object stores have no locks: there a later run takes the folder over, and the earlier one
    gets the error.) Any process may load.

    The newest checkpoint is that of the highest step. So a run that starts again, or resumes from
    an earlier step than the last, must save in another folder.
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
        if isinstance(keep, bool) or not isinstance(keep, numbers.Integral):
            raise TypeError(f"keep must be an int, got {keep!r}")
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._storage = Storage(path)
        self._contents = FolderContents(self._storage)
        self._keep = keep
        self._timeout = timeout
        self._claim: WriterClaim | None = None
        self._group: CpuGroup | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self.rows_left_out: dict[str, int] = {}
        """By table, how many ids of the checkpoint that was loaded last found no row, since those
        of greater scores filled the run's table, which is smaller; of all ranks together."""

    def __str__(self) -> str:
        return self._storage.url

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return self._contents.steps()

    def claim(self) -> None:
        """Take the folder for this run's saves, so that another run's saves are refused.

        :meth:`save` does so, too. Call this at the start of a run to learn before training whether
        the run that it resumes is still alive. Collective.

        Raises:
            RuntimeError: if another process has the folder; names it.
        """
        what = f"take {self} for this run's checkpoints"
        decide_on_first_rank(self._take, what, self._cpu_group(what))

    def _take(self) -> None:
        if self._claim is None:
            self._claim = claim_of(self._storage, self)
        self._claim.take()

    def close(self) -> None:
        """Wait for an asynchronous save, then leave the folder to other runs. Collective."""
        try:
            self.wait()
        finally:
            if self._claim is not None:
                self._claim.leave(self)
            self._claim = None
            group, self._group = self._group, None
            if group is not None:
                group.close()

    def _cpu_group(self, what: str) -> CpuGroup:
        """All ranks, through the CPU, apart from what the run itself sends; made once."""
        if self._group is None:
            self._group = CpuGroup(what, self._timeout)
        return self._group

    def save(self, step: int, run: TrainingRun, *, wait: bool = True) -> None:
        """Write the state of ``run`` after ``step`` steps, then remove older checkpoints.

        Each rank writes several files at once. From a GPU each of the writing threads copies some
        megabytes to the CPU at a time; state on the CPU is not copied. An earlier asynchronous save
        is waited for first, and its error is raised. A checkpoint of the same step is replaced.
        Collective.

        Args:
            wait: return once the checkpoint is complete. Otherwise the state is copied to the CPU,
                which must have memory for it, and a thread writes the copy while training goes on;
                :meth:`wait` must be called before the process group is destroyed.

        Raises:
            OSError, RuntimeError: if writing fails, on every rank, or another process has the
                folder, which is named.
            TimeoutError, ConnectionError: if ranks did not come; names them. This object is of
                no use then: end the run, or make another one on every rank.
            ValueError: if an optimizer holds parameters that are not the model's, the ranks'
                steps or optimizers differ, or ``step`` is negative.
            TypeError: if ``step`` is no int.
        """
        if isinstance(step, bool) or not isinstance(step, numbers.Integral):
            raise TypeError(f"step must be an int, got {step!r}")
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        self.wait()
        what = f"save a checkpoint of step {step} in {self}"
        group = self._cpu_group(what)
        check_agreement(step, run, group, what)
        databases = raise_on_all_ranks(lambda: RunDatabases(run), what, group)
        state = raise_on_all_ranks(lambda: state_of(run, databases), what, group)
        if wait:
            self._write(step, state, databases, group, what)
            return
        copied = raise_on_all_ranks(lambda: on_cpu(state), what, group)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(self._write, step, copied, databases, group, what)
        atexit.register(self.wait)  # a failure that nobody asked for is shown at the end

    def wait(self) -> None:
        """Return once an asynchronous save is complete, and raise what it raised. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            # The registration would keep this object, and with it its claim, until the program
            # ends.
            atexit.unregister(self.wait)
            pending.result()

    def _write(
        self,
        step: int,
        state: dict[str, object],
        databases: RunDatabases,
        group: CpuGroup,
        what: str,
    ) -> None:
        checkpoint, token = decide_on_first_rank(lambda: self._begin(step), what, group)
        path = self._storage.path(str(checkpoint))
        folder = self._atomic(path)
        raise_on_all_ranks(lambda: folder.check_token(token), what, group)
        # The marker must list the files of this checkpoint alone.
        self._storage.written.clear()
        raise_on_all_ranks(lambda: databases.put(self._storage, path), what, group)
        write_state(state, CheckpointWriter(self._storage, path), group, what)
        written = group.gather(self._storage.written, what)
        start = f"{path}/"
        files = {name.removeprefix(start): d for part in written for name, d in part.items()}

        # Old checkpoints go only once the new one counts, so that there is one at every moment.
        def complete() -> None:
            self._complete(step, path, token, files)
            self._contents.remove_old(checkpoint, self._keep)

        decide_on_first_rank(complete, what, group)

    def _begin(self, step: int) -> tuple[CheckpointName, str]:
        """Make the folder of a new checkpoint, with a token that the other ranks must see there."""
        self._take()
        checkpoint = self._contents.begin(step)
        path = self._storage.path(str(checkpoint))
        return checkpoint, self._atomic(path).begin()

    def _atomic(self, path: str) -> AtomicFolder:
        return AtomicFolder(self._storage, path, MARKER_FILE)

    def _complete(self, step: int, path: str, token: str, files: dict[str, FileDigest]) -> None:
        """Put the marker in place, unless another process has interfered since :meth:`_begin`."""
        # Where there are no locks another run may have taken the folder over since: its checkpoint
        # would be of the same step, and the files of both mixed.
        assert self._claim is not None
        self._claim.check()
        folder = self._atomic(path)
        if not folder.has_token(token):
            raise RuntimeError(
                f"one run at a time may save in {self}, and another one has removed or replaced "
                f"{path} while it was written; end one of them, or give it another folder"
            )
        folder.complete(Marker(step, ranks.world_size(), files).to_bytes())

    def load(self, run: TrainingRun, step: int | None = None) -> int | None:
        """Read the newest complete checkpoint, or the one of ``step``, into ``run`` in place.

        The number of ranks and the placement of tables may differ from those that saved. If as many
        ranks load as saved, each rank gets back the states that belong to it. Otherwise
        ``run.others`` get what rank 0 saved, and random generators stay as they are; so they do if
        the run has neither optimizers nor others, since it then does not continue training.

        A run without optimizers can load the model, and its ``others``, of any checkpoint. Saved
        others that are not in ``run`` are ignored. Collective. Parts of a checkpoint are unpickled:
        load only what you trust.

        Returns:
            The step, or None if there is no complete checkpoint and ``step`` is None.

        Raises:
            FileNotFoundError: if there is none of ``step``, or a file of it is missing.
            TimeoutError, ConnectionError: as for :meth:`save`.
            ValueError: if a file is not as it was written, or the checkpoint is of another model
                or run, with all mismatches. Nothing is changed in either case.
        """
        with self._opened(step) as opened:
            if opened is None:
                return None
            found_step, saved = opened
            self.rows_left_out = load_state(run, saved)
        if ranks.rank() == 0:
            for name, number in self.rows_left_out.items():
                _logger.warning(
                    "%d ids of %s in %s found no row and were left out: those of the least scores "
                    "in a table that is smaller",
                    number,
                    name,
                    saved.name,
                )
        return found_step

    def load_others(self, others: Mapping[str, Stateful], step: int | None = None) -> int | None:
        """Read the states of ``others`` alone, of the newest complete checkpoint or the one of
        ``step``, as :meth:`load` does for a run that has them: no model is needed. Random
        generators stay as they are. Collective.

        Returns:
            The step, or None if there is no complete checkpoint and ``step`` is None.

        Raises:
            FileNotFoundError, TimeoutError, ConnectionError: as for :meth:`load`.
            ValueError: if a file is not as it was written, or one of ``others`` was not saved.
                Nothing is changed in either case.
        """
        with self._opened(step) as opened:
            if opened is None:
                return None
            found_step, saved = opened
            load_others(others, saved)
        return found_step

    @contextlib.contextmanager
    def _opened(self, step: int | None) -> Iterator[tuple[int, SavedState] | None]:
        """The newest complete checkpoint, or the one of ``step``, and its step, once its files are
        compared with its marker; None where there is none. Collective."""
        self.wait()
        what = f"load a checkpoint of {self}"
        group = self._cpu_group(what)
        checkpoint = decide_on_first_rank(lambda: self._contents.choose(step), what, group)
        if checkpoint is None:
            yield None
            return
        path = self._storage.path(str(checkpoint))
        # Rank 0 chooses, and the others must see the same marker: the folder may have changed
        # between their looks at it, or be another one.
        marker_path = f"{path}/{MARKER_FILE}"
        written = decide_on_first_rank(lambda: self._storage.read(marker_path), what, group)
        marker = raise_on_all_ranks(lambda: self._read_marker(marker_path, written), what, group)
        raise_on_all_ranks(lambda: self._check_files(path, marker.files), what, group)
        reader = CheckpointReader(self._storage, path)
        metadata = raise_on_all_ranks(reader.read_metadata, what, group)
        folders = DatabaseFolders(self._storage, path)
        tensors = raise_on_all_ranks(
            lambda: SavedTensors(metadata, self._storage, path, folders.open), what, group
        )
        saved = SavedState(
            name=f"checkpoint {path}",
            tensors=tensors,
            num_ranks=marker.num_ranks,
            read=lambda state: read_state(state, reader, metadata, group, what),
            group=group,
            local_folder=folders.local,
        )
        try:
            yield checkpoint.step, saved
        finally:
            tensors.databases.close()
            folders.close()

    def _read_marker(self, path: str, seen_by_first: bytes) -> Marker:
        try:
            seen = self._storage.read(path)
        except FileNotFoundError:
            seen = b""
        if seen != seen_by_first:
            raise ValueError(
                f"path must be one folder that all ranks see, and rank {ranks.rank()} does not see "
                f"the {path} that rank 0 sees"
            )
        try:
            return Marker.parse(seen)
        except ValueError as error:
            raise ValueError(f"file {path} is corrupt: load an earlier step ({error})") from None

    def _check_files(self, path: str, files: dict[str, FileDigest]) -> None:
        """Compare this rank's share of the files, read whole, with what the marker says of them."""

        def check(name: str) -> None:
            file = f"{path}/{name}"
            if not self._storage.exists(file):
                raise FileNotFoundError(f"checkpoint {path} lacks its file {name}")
            self._storage.check_unchanged(file, files[name], "load an earlier step")

        in_threads(check, [name for name in sorted(files) if _checker(name) == ranks.rank()])


def _checker(name: str) -> int:
    """The rank that checks a file: where possible the one that wrote it, and is likely to load it
    next, from its machine's memory."""
    writer = _DATA_FILE.match(name)
    return int(writer[1]) % ranks.world_size() if writer else 0
