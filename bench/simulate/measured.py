"""Measured steps, beside which the simulation is fitted and judged."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.report.result_file import Row, was_timed_first
from bench.simulate.schedule import Sharing, Task, run
from bench.simulate.step import Setting, simulated_step
from torchembed.sharding.planning.topology import GPUS

MOST_SPREAD = 1.1
"""Longest time of a row that is taken, over its shortest and over that in which the GPU was busy:
in others the host was late."""


class Comparison(NamedTuple):
    """A measured step and its tasks."""

    setting: Setting
    milliseconds: float
    tasks: list[Task]

    def ratio(self, sharing: Sharing) -> float:
        """The simulated time over the measured one."""
        return simulated_ms(self.tasks, sharing) / self.milliseconds


def simulated_ms(tasks: Sequence[Task], sharing: Sharing) -> float:
    """Milliseconds from the first task's beginning to the last one's end."""
    return 1e3 * max(span.end for span in run(tasks, sharing))


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """The steps in 16-bit precision with Adagrad among ``rows`` of ``bench.step.train_step``, of
    several GPUs those by push, each setting once: the last of several, of those timed before any
    profile where there are some, and none whose host was late, by :data:`MOST_SPREAD`."""
    found: dict[Setting, float] = {}
    timed_first: set[Setting] = set()
    for row in rows:
        is_ours = row.get("bench") == "train_step" and row.get("system") == "torchembed"
        if not is_ours or row["precision"] != "bf16" or "ms_median" not in row:
            continue
        by_collectives = row["num_gpus"] > 1 and row["transport"] != "push"
        if by_collectives or row["optimizer"] != "adagrad":
            continue
        hardware = next((gpu for gpu in GPUS if gpu.name in row["gpu"]), None)
        least = min(row["ms_min"], row.get("gpu_busy_ms", row["ms_min"]))
        if hardware is None or row["ms_max"] > MOST_SPREAD * least:
            continue
        setting = Setting(
            hardware=hardware,
            num_gpus=row["num_gpus"],
            batch_per_gpu=row["batch_per_gpu"],
            ids=row["ids"],
            max_rows=row["max_rows"],
            optimizer=row["optimizer"],
            wire=row["wire"],
        )
        if was_timed_first(row):
            timed_first.add(setting)
        elif setting in timed_first:
            continue
        found[setting] = row["ms_median"]
    return [Comparison(s, ms, simulated_step(s).tasks) for s, ms in found.items()]


def squares(measured: Sequence[Comparison], sharing: Sharing) -> float:
    """The sum of the squares of relative errors."""
    return sum((each.ratio(sharing) - 1) ** 2 for each in measured)


def fitted(measured: Sequence[Comparison]) -> Sharing:
    """The sharing with the least :func:`squares`, by steps of .05."""
    grid = [Sharing(k / 20, w / 20) for k in range(21) for w in range(21)]
    return min(grid, key=lambda sharing: squares(measured, sharing))
