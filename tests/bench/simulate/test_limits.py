"""What would be saved if a part of a step were free, exactly."""

import pytest

from bench.simulate.limits import Limit, savings
from bench.simulate.schedule import Engine, Sharing, Task

GPU, WIRES = Engine.MULTIPROCESSORS, Engine.WIRES


def test_counts_each_part_of_tasks_that_follow_one_another() -> None:
    tasks = [
        Task("lookup", GPU, 1.0),
        Task("vectors back", WIRES, 5.0, ("lookup",), met_seconds=2.0),
        Task("forward", GPU, 4.0, ("vectors back",)),
    ]
    assert savings(tasks, Sharing(0.6, 1.0)) == pytest.approx(
        {Limit.ROWS: 0.1, Limit.LINKS: 0.3, Limit.LATENCY: 0.2, Limit.DENSE: 0.4}
    )


def test_what_hides_behind_something_longer_saves_nothing() -> None:
    tasks = [Task("row update", GPU, 4.0), Task("mean 0", WIRES, 3.0, met_seconds=1.0)]
    found = savings(tasks, Sharing(0.0, 0.0))
    assert found == {Limit.ROWS: 0.25, Limit.LINKS: 0.0, Limit.LATENCY: 0.0, Limit.DENSE: 0.0}
