"""Runs the tasks of one step on a GPU's multiprocessors and its wires, without a GPU.

A task begins when those that it waits for have ended. Tasks that run at the same time slow one
another down: of ``n`` tasks on the multiprocessors each proceeds at ``1 / (1 + shared * (n - 1))``
of its speed alone, so that ``shared = 0`` hides all of them behind the longest and ``shared = 1``
hides nothing; each task on the wires, whose kernels take multiprocessors, too, adds
``wire_shared`` to that. Tasks on the wires divide their rate evenly.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Engine(enum.Enum):
    """Parts of a machine that tasks run on."""

    MULTIPROCESSORS = "multiprocessors"
    WIRES = "wires"


class Task(NamedTuple):
    """A part of a step."""

    name: str
    engine: Engine
    seconds: float
    """The time that it takes alone."""
    after: tuple[str, ...] = ()
    """Names of the tasks that it waits for."""
    met_seconds: float = 0.0
    """The part of ``seconds`` in which ranks meet, however few bytes they exchange."""


class Sharing(NamedTuple):
    """How much tasks that run at the same time slow one another down, 0 to 1."""

    shared: float
    wire_shared: float


FITTED = Sharing(shared=0.6, wire_shared=1.0)
"""The sharing that fits the steps in ``bench/results``: ``python -m bench.simulate --fit``."""


class Span(NamedTuple):
    """When a task ran, in seconds from the beginning of the step."""

    name: str
    engine: Engine
    start: float
    end: float


def stage_of(task: str) -> str:
    """The stage that the task of that name is a part of: its name without the number."""
    return task.rstrip("0123456789 ")


def run(tasks: Sequence[Task], sharing: Sharing) -> list[Span]:
    """The times of ``tasks``, in the order in which they end.

    Raises:
        ValueError: where tasks wait for each other, or for one that is not there.
    """
    waiting = {task.name: task for task in tasks}
    left: dict[str, float] = {}
    begun: dict[str, float] = {}
    ended: dict[str, Span] = {}
    now = 0.0
    while waiting or left:
        for task in [t for t in waiting.values() if ended.keys() >= set(t.after)]:
            del waiting[task.name]
            left[task.name], begun[task.name] = task.seconds, now
        if not left:
            raise ValueError(f"tasks {sorted(waiting)} wait for each other, or for one not there")
        engines = {task.name: task.engine for task in tasks if task.name in left}
        rates = _rates(engines, sharing)
        step = min(left[name] / rates[name] for name in left)
        now += step
        for name in list(left):
            left[name] -= step * rates[name]
            if left[name] <= 1e-12:
                del left[name]
                ended[name] = Span(name, engines[name], begun[name], now)
    return list(ended.values())


def _rates(engines: dict[str, Engine], sharing: Sharing) -> dict[str, float]:
    """The share of its speed alone at which each running task proceeds."""
    num_wires = sum(engine is Engine.WIRES for engine in engines.values())
    others = len(engines) - num_wires - 1
    slowed = 1 + sharing.shared * others + sharing.wire_shared * num_wires
    return {
        name: 1 / num_wires if engine is Engine.WIRES else 1 / slowed
        for name, engine in engines.items()
    }
