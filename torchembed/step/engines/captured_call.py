"""A call that is captured once and replayed: a CUDA graph, or, without a GPU, the call again."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from torchembed.sharding.transport.collectives import GatheredSize, replayed_sizes
from torchembed.step.graph_capture import captured_graph
from torchembed.tables import RecordedMoves, recording_moves

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class CapturedCall:
    """Captures ``call`` on construction, and repeats it by :meth:`replay`.

    On a CPU, which has no graphs, nothing runs on construction, and a replay calls again with what
    a captured call may rely on: the sizes that the ranks exchanged before.

    Args:
        call: a step. On a GPU it must not wait for the device, and allocates in ``pool``.
        sizes: what the ranks tell each other within it, in order, so that no rank is asked again;
            None, on a CPU alone, where they differ from step to step.
        stream: where the capture runs; None on a CPU.
        pool: of the memory of all captures that never run at once; None on a CPU.

    Raises:
        Exception: what ``call`` raises, or CUDA for what cannot be captured.
    """

    def __init__(
        self,
        call: Callable[[], None],
        sizes: Sequence[GatheredSize] | None,
        stream: torch.cuda.Stream | None,
        pool: "_POOL_HANDLE | None",
    ) -> None:
        self._call, self._sizes = call, sizes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._moves: list[RecordedMoves] = []
        """Moves of lines of tables on disk."""
        if stream is not None:
            with recording_moves() as self._moves:
                self._graph = captured_graph(self._run, stream, pool)

    def _run(self) -> None:
        with contextlib.nullcontext() if self._sizes is None else replayed_sizes(self._sizes):
            self._call()

    @property
    def calls_again(self) -> bool:
        """True where a replay runs the call's Python again: on a CPU."""
        return self._graph is None

    def replay(self) -> None:
        """Do what the captured call did, on what its memory holds now."""
        if self._graph is None:
            self._run()
            return
        with self._moved_lines():
            self._graph.replay()

    @contextlib.contextmanager
    def _moved_lines(self) -> Iterator[None]:
        """A context for the launch of a replay, which reads lines of tables on disk that were moved
        to host memory before, and chooses others."""
        for moves in self._moves:
            moves.before_replay()
        yield
        for moves in self._moves:
            moves.after_replay()

    def release(self) -> None:
        """Destroy the graph; no replay comes after it."""
        if self._graph is not None:
            self._graph.reset()
        self._moves = []
