"""Schedules of tasks, to the second, and the errors of what cannot run."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bench.simulate.schedule import Engine, Sharing, Task, run

GPU, WIRES = Engine.MULTIPROCESSORS, Engine.WIRES
HIDES_NOTHING, HIDES_ALL = Sharing(1.0, 1.0), Sharing(0.0, 0.0)


def times(tasks: list[Task], sharing: Sharing) -> dict[str, tuple[float, float]]:
    return {s.name: (round(s.start, 9), round(s.end, 9)) for s in run(tasks, sharing)}


def test_tasks_wait_for_each_other() -> None:
    tasks = [Task("c", GPU, 1.0, ("a", "b")), Task("a", GPU, 2.0), Task("b", WIRES, 5.0, ("a",))]
    expected = {"a": (0, 2), "b": (2, 7), "c": (7, 8)}
    assert times(tasks, HIDES_NOTHING) == times(tasks, HIDES_ALL) == expected


def test_tasks_that_run_together_slow_one_another_down() -> None:
    tasks = [Task("long", GPU, 3.0), Task("short", GPU, 1.0)]
    assert times(tasks, HIDES_ALL) == {"short": (0, 1), "long": (0, 3)}
    assert times(tasks, HIDES_NOTHING) == {"short": (0, 2), "long": (0, 4)}
    assert times(tasks, Sharing(0.5, 0.0)) == {"short": (0, 1.5), "long": (0, 3.5)}


def test_wires_slow_kernels_down_and_share_their_rate() -> None:
    tasks = [Task("kernel", GPU, 2.0), Task("a", WIRES, 1.0), Task("b", WIRES, 1.0)]
    assert times(tasks, HIDES_ALL) == {"kernel": (0, 2), "a": (0, 2), "b": (0, 2)}
    # Two tasks on the wires for two seconds, in which the kernel is half as fast, then none.
    assert times(tasks, Sharing(0.0, 0.5)) == {"a": (0, 2), "b": (0, 2), "kernel": (0, 3)}


def test_tasks_without_time_end_at_once() -> None:
    assert times([Task("a", WIRES, 0.0), Task("b", GPU, 1.0, ("a",))], HIDES_NOTHING) == {
        "a": (0, 0),
        "b": (0, 1),
    }
    assert run([], HIDES_ALL) == []


@pytest.mark.parametrize("after", ["b", "elsewhere"])
def test_refuses_what_waits_for_ever(after: str) -> None:
    tasks = [Task("a", GPU, 1.0, (after,)), Task("b", GPU, 1.0, ("a",))]
    with pytest.raises(ValueError, match=r"^tasks \['a', 'b'\] wait for each other, or for one"):
        run(tasks, HIDES_ALL)


@given(
    seconds=st.lists(st.floats(0.01, 9.0), min_size=1, max_size=6),
    links=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8),
    on_wires=st.integers(0, 63),
    shared=st.floats(0.0, 1.0),
)
def test_bounds(
    seconds: list[float], links: list[tuple[int, int]], on_wires: int, shared: float
) -> None:
    """No step is shorter than its longest chain of tasks, nor longer than all, one by one."""
    after: dict[int, set[int]] = {}
    for one, other in links:
        if max(one, other) < len(seconds) and one != other:
            after.setdefault(max(one, other), set()).add(min(one, other))
    tasks = [
        Task(
            str(n),
            WIRES if on_wires >> n & 1 else GPU,
            time,
            tuple(map(str, sorted(after.get(n, ())))),
        )
        for n, time in enumerate(seconds)
    ]
    chains: list[float] = []
    for n, time in enumerate(seconds):
        chains.append(time + max((chains[m] for m in after.get(n, ())), default=0.0))
    spans = run(tasks, Sharing(shared, 0.0))
    end = max(span.end for span in spans)
    assert max(chains) * (1 - 1e-9) <= end <= sum(seconds) * (1 + 1e-9)
    assert sorted(int(span.name) for span in spans) == list(range(len(seconds)))
