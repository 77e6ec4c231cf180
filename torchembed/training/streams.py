"""Streams and events of a device that may have none: then everything is done in order."""

import contextlib
from typing import Any

import torch


def on(stream: "torch.cuda.Stream | None") -> Any:
    """A context in which ``stream`` is the current one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def event_on(stream: "torch.cuda.Stream | None") -> "torch.cuda.Event | None":
    """What comes once ``stream`` has done what it has got so far."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def wait_for(event: "torch.cuda.Event | None") -> None:
    """Let the current stream wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
