"""Streams of a GPU, on which a step runs or has some of its work beside the rest; on the CPU, where
there are none, each of these does nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class StepStreams(NamedTuple):
    """Those of a step; None on the CPU.

    Where several have kernels to run, what others wait for goes first, and the rows' update last:
    nothing waits for it, and alone it fills the GPU.
    """

    step: torch.cuda.Stream | None = None
    vectors: torch.cuda.Stream | None = None
    ids: torch.cuda.Stream | None = None
    rows: torch.cuda.Stream | None = None
    gradients: torch.cuda.Stream | None = None
    """Where backward is called; like those that follow, of several ranks only."""
    last_rows: torch.cuda.Stream | None = None
    """What is left of rows once backward is done is little, and goes before the dense update."""
    dense: torch.cuda.Stream | None = None

    @classmethod
    def on(cls, device: torch.device, *, of_several_ranks: bool) -> "StepStreams":
        """New ones."""
        if device.type != "cuda":
            return cls()
        stream = torch.cuda.Stream
        of_one = cls(
            step=stream(device, priority=-3),
            vectors=stream(device, priority=-2),
            ids=stream(device, priority=-1),
            rows=stream(device),
        )
        if not of_several_ranks:
            return of_one
        return of_one._replace(
            gradients=stream(device),
            last_rows=stream(device, priority=-3),
            dense=stream(device, priority=-1),
        )


def on(stream: torch.cuda.Stream | None) -> Any:
    """What is inside runs on ``stream``."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is inside runs on ``stream``, after what the current one has got, and beside what that
    one gets then."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with on(stream):
        yield


@contextlib.contextmanager
def between(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is inside runs on ``stream``, after what the current one has got, and before what that
    one gets then."""
    with beside(stream):
        yield
    join(stream)


def join(*streams: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for others."""
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)


def event_on(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """What comes once ``stream`` has done what it has got so far."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
