"""Lines that a thread of its own moves between host memory and disk, as a device has chosen them.

The device chooses which rows leave the memory of the host, and which come in, and copies that to
memory of the host. The thread waits for the copy, writes the lines that leave, and reads those that
come. So a step on a GPU waits for no host, and a host for no step.
"""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.ops.row_cache import RowMoves
from torchembed.tables.tiers.host_memory import host_tensor
from torchembed.tables.tiers.initial_lines import RowIdentities

_POLL_SECONDS = 5e-5
_LIMIT_SECONDS = 600.0
"""The time that a device has to begin a step."""
_CLOSE_SECONDS = 10.0
"""The time in which what devices have chosen arrives, where their steps are done."""


class MovedLines(NamedTuple):
    """Lines to be moved, on the host."""

    places: Tensor
    """int64 ``[n]``: places in host memory, each once."""
    written_rows: Tensor
    """int64 ``[n]``: the row whose line is to be written from there first; -1 for none."""
    read_rows: Tensor
    """int64 ``[n]``: the row whose line is to be read there."""
    identities: RowIdentities | None
    """The identities of ``read_rows`` in dynamic tables; None in static ones."""


class MoveBuffer:
    """Memory of the host for moves that a device chooses.

    Args:
        num_moves: the most moves.
        has_identities: whether identities of rows come along.
        device: that chooses.
    """

    def __init__(self, num_moves: int, has_identities: bool, device: torch.device) -> None:
        self._has_identities = has_identities
        num_columns = 5 if has_identities else 3
        self._numbers = host_tensor((num_moves * num_columns + 1,), torch.int64, device)
        self._arrived = host_tensor((1,), torch.int64, device).zero_()
        """1 once the numbers are there."""

    def copy_from(self, moves: RowMoves, identities: RowIdentities | None) -> None:
        """Copy ``moves``, to be written and read on disk, from the device; waits for nothing."""
        parts = [moves.slots.long(), moves.written_rows, moves.read_rows]
        if identities is not None:
            parts += [identities.ids, identities.are_new.long()]
        numbers = torch.cat([*parts, moves.count])
        self._numbers.copy_(numbers, non_blocking=True)
        # After it: copies of one stream are done in order.
        self._arrived.copy_(torch.ones_like(moves.count), non_blocking=True)

    def wait(self, limit_seconds: float, is_abandoned: Callable[[], bool]) -> MovedLines | None:
        """The moves, once the device has copied them; the next copy may then be waited for.

        Returns:
            None where ``is_abandoned`` is True before.

        Raises:
            TimeoutError: if they do not come.
        """
        deadline = time.monotonic() + limit_seconds
        while not int(self._arrived):
            if is_abandoned():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the GPU has not begun a step in {limit_seconds:g} s; where several ranks "
                    "train, look for one that died or is stuck"
                )
            time.sleep(_POLL_SECONDS)
        self._arrived.zero_()
        count = int(self._numbers[-1])
        columns = self._numbers[:-1].view(5 if self._has_identities else 3, -1)[:, :count]
        places, written, read = columns[:3]
        identities = RowIdentities(columns[3], columns[4] != 0) if self._has_identities else None
        return MovedLines(places, written, read, identities)


class LineMover:
    """Moves lines on a thread of its own, in the order of :meth:`submit`; the thread begins with
    the first call, and ends with :meth:`stop` or with the object."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        """It fails where one before it has failed."""
        self._is_stopped = threading.Event()

    def submit(self, buffer: MoveBuffer, move: Callable[[MovedLines], None]) -> None:
        """Have ``move`` called with the moves of ``buffer``, once these have arrived; not where
        moves before them have failed."""
        is_abandoned = self._is_stopped.is_set
        before = self._last

        def task() -> None:
            moves = buffer.wait(_LIMIT_SECONDS, is_abandoned)
            # Done by now. What was not written must not be read.
            failure = None if before is None else before.exception()
            if failure is not None:
                raise failure
            if moves is None:
                raise RuntimeError(
                    "rows on disk were not read for a step that was not begun when its pipeline "
                    "was closed; load a checkpoint"
                )
            move(moves)

        self._last = self._on_thread(task)

    def made(self, make: Callable[[], MoveBuffer]) -> MoveBuffer:
        """Call ``make`` on the thread and return its result: a thread that captures a graph may not
        lock memory."""
        found: list[MoveBuffer] = []
        self._on_thread(lambda: found.append(make())).result()
        return found[0]

    def _on_thread(self, task: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            name = "torchembed: lines of tables on disk"
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        return self._thread.submit(task)

    def wait(self) -> None:
        """Wait until all lines were moved; any thread may.

        Raises:
            Exception: what moving failed with, in this call and all that follow.
        """
        failure = None if self._last is None else self._last.exception()
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """End the thread, after what was submitted; a further call begins it anew. Moves that do
        not arrive soon are left, and further calls raise then."""
        if self._thread is not None:
            if self._last is not None:
                concurrent.futures.wait([self._last], _CLOSE_SECONDS)
            self._is_stopped.set()
            self._thread.shutdown(wait=True)
            self._thread = None
            self._is_stopped.clear()


class RecordedMoves(NamedTuple):
    """The moves of lines that replays of a captured call need: lines must be there where it brings
    rows to the device, and the host must move those that it chooses to move."""

    mover: LineMover
    buffer: MoveBuffer | None = None
    """Takes the moves that each replay chooses; None where it chooses none."""
    move: Callable[[MovedLines], None] | None = None

    def before_replay(self) -> None:
        """Wait until the lines of calls before are there.

        Raises:
            Exception: as :meth:`LineMover.wait`.
        """
        self.mover.wait()

    def after_replay(self) -> None:
        """Have the lines moved that a replay, which was launched, chooses."""
        if self.buffer is not None and self.move is not None:
            self.mover.submit(self.buffer, self.move)


_recorded: ContextVar[list[RecordedMoves] | None] = ContextVar("recorded_moves", default=None)


def recorded_moves() -> list[RecordedMoves] | None:
    """The list that takes the moves of the call that is captured; None outside of a capture."""
    return _recorded.get()


@contextlib.contextmanager
def recording_moves() -> Iterator[list[RecordedMoves]]:
    """A context for the capture of a call: it has no lines moved, and waits for none, but notes
    in the list that it gives what its replays do."""
    found: list[RecordedMoves] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)
