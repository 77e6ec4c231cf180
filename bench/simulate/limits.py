"""What limits a step: how much shorter it would be if rows, products or exchanges were free."""

import enum
from collections.abc import Sequence

from bench.simulate.schedule import Engine, Sharing, Task, run, stage_of


class Limit(enum.Enum):
    """Parts of a step, each of which may limit it."""

    ROWS = "rows"
    """Lookups, row updates, finding the rows of ids: a GPU's memory bandwidth."""
    DENSE = "dense part"
    """Its forward, backward and update."""
    LINKS = "links"
    """The bytes that GPUs exchange."""
    LATENCY = "latency"
    """The meetings of ranks in each exchange."""


ROW_STAGES = ("lookup", "find runs", "row update")
"""Stages on the multiprocessors that are not the dense part's."""


def savings(tasks: Sequence[Task], sharing: Sharing) -> dict[Limit, float]:
    """The share of the step of ``tasks``, which takes some time, that would be saved if each limit
    alone took none. Limits that hide each other save little each; the shares need not add up."""
    whole = _seconds(tasks, sharing)
    return {
        limit: 1 - _seconds([_without(task, limit) for task in tasks], sharing) / whole
        for limit in Limit
    }


def _seconds(tasks: Sequence[Task], sharing: Sharing) -> float:
    return max(span.end for span in run(tasks, sharing))


def _without(task: Task, limit: Limit) -> Task:
    if task.engine is Engine.WIRES:
        if limit is Limit.LATENCY:
            return task._replace(seconds=task.seconds - task.met_seconds, met_seconds=0.0)
        return task._replace(seconds=task.met_seconds) if limit is Limit.LINKS else task
    of_rows = stage_of(task.name) in ROW_STAGES
    is_free = limit is Limit.ROWS if of_rows else limit is Limit.DENSE
    return task._replace(seconds=0.0) if is_free else task
