"""Draws simulated steps: a lane for each engine, and how the step grows with the GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.simulate.schedule import Engine, Span, stage_of


class Simulated(NamedTuple):
    """The step of some number of GPUs."""

    num_gpus: int
    spans: list[Span]

    @property
    def milliseconds(self) -> float:
        """The time of the step."""
        return 1e3 * max(span.end for span in self.spans)


def draw(steps: Sequence[Simulated], path: Path, *, title: str) -> None:
    """Write a picture of ``steps`` to ``path``, the timeline of each above their times."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    palette = [pyplot.get_cmap("tab20")(n) for n in range(20)]
    colours = dict(zip(dict.fromkeys(_stages(steps)), palette, strict=False))
    figure, axes = pyplot.subplots(
        len(steps) + 1, 1, figsize=(11, 1.5 * len(steps) + 3), layout="constrained"
    )
    for axis, step in zip(axes, steps, strict=False):
        _draw_timeline(axis, step, colours)
    times = axes[-1]
    numbers = [step.num_gpus for step in steps]
    times.plot(numbers, [step.milliseconds for step in steps], marker="o")
    times.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms a step")
    times.set_xticks(numbers, [str(number) for number in numbers])
    times.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    handles = [Patch(color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside right upper", fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _stages(steps: Sequence[Simulated]) -> list[str]:
    spans = [span for step in steps for span in sorted(step.spans, key=lambda s: s.start)]
    return [stage_of(span.name) for span in spans]


def _draw_timeline(axis: Any, step: Simulated, colours: dict[str, tuple[float, ...]]) -> None:
    lanes: dict[Engine, list[float]] = {engine: [] for engine in Engine}
    labels: list[tuple[float, str]] = []
    bottom = 0
    for engine in Engine:
        ends = lanes[engine]
        first = bottom
        for span in sorted((s for s in step.spans if s.engine is engine), key=lambda s: s.start):
            # The first row that is free again: tasks that run together lie above each other.
            row = next((n for n, end in enumerate(ends) if end <= span.start + 1e-9), len(ends))
            ends[row : row + 1] = [span.end]
            axis.barh(
                first + row,
                1e3 * (span.end - span.start),
                left=1e3 * span.start,
                color=colours[stage_of(span.name)],
                edgecolor="white",
            )
        bottom += max(len(ends), 1)
        labels.append(((first + bottom - 1) / 2, engine.value))
    axis.set_yticks(*zip(*labels, strict=True))
    axis.invert_yaxis()
    axis.set_title(f"{step.num_gpus} GPUs: {step.milliseconds:.2f} ms a step", fontsize=9)
