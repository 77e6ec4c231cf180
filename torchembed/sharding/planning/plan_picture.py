"""A picture of a plan: time and memory by rank."""

from pathlib import Path

import numpy as np

from torchembed.sharding.planning.plan_report import TIME_PARTS, PlanReport

GIB = 1 << 30


def draw_plan(report: PlanReport, path: str | Path, *, title: str = "") -> None:
    """Draw predicted milliseconds and held memory of every rank into a PNG at ``path``.

    Needs matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(2, 1, sharex=True)
    if title:
        figure.suptitle(title)
    numbers = np.arange(len(report.ranks))
    below = np.zeros(len(numbers))
    for part in TIME_PARTS:
        values = np.array([getattr(rank, f"{part}_seconds") for rank in report.ranks]) * 1e3
        time_axes.bar(numbers, values, bottom=below, width=1.0, label=part.replace("_", "-"))
        below += values
    time_axes.axhline(below.mean(), color="tab:gray", linestyle="--", label="mean")
    time_axes.set_ylabel("predicted time (ms a step)")
    weights = np.array([rank.weight_bytes for rank in report.ranks]) / GIB
    growth = np.array([rank.growth_bytes for rank in report.ranks]) / GIB
    buffers = np.array([rank.buffer_bytes for rank in report.ranks]) / GIB
    memory_axes.bar(numbers, weights, width=1.0, label="rows and state")
    if growth.any():
        memory_axes.bar(numbers, growth, bottom=weights, width=1.0, label="growth")
    memory_axes.bar(numbers, buffers, bottom=weights + growth, width=1.0, label="buffers")
    limit = report.topology.memory_bytes / GIB
    memory_axes.axhline(limit, color="tab:red", linestyle="--", label="limit")
    memory_axes.set_ylabel("memory (GiB)")
    memory_axes.set_xlabel("rank")
    for axes in (time_axes, memory_axes):
        axes.grid(alpha=0.3, axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(Path(path))
