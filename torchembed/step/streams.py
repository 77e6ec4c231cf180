"""The CUDA streams of a step, how work forks to them and joins again, and what profiles call it.

On a CPU, which has no streams, forks, joins and events are nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = contextlib.nullcontext()


class StepStreams(NamedTuple):
    """The streams of a step, each None on a CPU.

    Priorities decide among streams that have kernels to run: what other work waits for goes first,
    and the update of rows last, since nothing waits for it and it fills the GPU by itself. Where
    the next batch's rows come from the host, its ids go before all: what the link brings for them
    takes longer than most steps.
    """

    step: torch.cuda.Stream | None = None
    vectors: torch.cuda.Stream | None = None
    ids: torch.cuda.Stream | None = None
    rows: torch.cuda.Stream | None = None
    gradients: torch.cuda.Stream | None = None
    """Backward is called here; this stream and the next two are there on several ranks only."""
    last_rows: torch.cuda.Stream | None = None
    """Rows whose gradients come last: few, and updated before the dense weights."""
    dense: torch.cuda.Stream | None = None

    @classmethod
    def on(
        cls, device: torch.device, *, of_several_ranks: bool, fetches_rows: bool
    ) -> "StepStreams":
        """New streams on ``device``.

        Args:
            fetches_rows: whether preparing a batch brings rows to the device.
        """
        if device.type != "cuda":
            return cls()
        stream = torch.cuda.Stream
        # torch has four priorities, of which -3 goes first.
        step, vectors, ids = (-2, -1, -3) if fetches_rows else (-3, -2, -1)
        of_one = cls(
            step=stream(device, priority=step),
            vectors=stream(device, priority=vectors),
            ids=stream(device, priority=ids),
            rows=stream(device),
        )
        if not of_several_ranks:
            return of_one
        return of_one._replace(
            gradients=stream(device),
            last_rows=stream(device, priority=step),
            dense=stream(device, priority=-1),
        )


def on_stream(
    stream: torch.cuda.Stream | None,
) -> contextlib.AbstractContextManager[object]:
    """A context whose work runs on ``stream``."""
    return _NOTHING if stream is None else torch.cuda.stream(stream)


def fork(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A context whose work runs on ``stream``: after what the current stream holds now, and
    concurrently with what the current stream gets later."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    return on_stream(stream)


@contextlib.contextmanager
def fork_and_join(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A context whose work runs on ``stream``: after what the current stream holds on entering, and
    before what it gets after leaving."""
    with fork(stream):
        yield
    join(stream)


def join(*streams: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for what ``streams`` hold."""
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)


def event_on(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event recorded on ``stream`` after what it holds; None on a CPU."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """A context that profiles show as ``name``.

    Without one of ``torch.profiler`` or ``torch.autograd.profiler`` it does nothing:
    ``record_function`` takes 7 us, which a step of half a millisecond would spend on each part.
    """
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING
