"""Draws one training step from a profiler's trace: streams as lanes, stages in colours; and prints
how long each stage takes, and how much of that no other hides.

``python -m bench.step.timeline TRACE PNG`` takes the traces that ``bench.step.train_step
--profiles`` and ``bench.tiers --profiles`` write.
"""

import argparse
import collections
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

STAGES = {
    "reduction over GPUs": r"nccl.*reduce|onerank",
    "exchange between GPUs": r"nccl",
    "ids: sort, find runs": r"find_runs|_digit|sum_counts|linearize_ids|radix|bucketize",
    "rows to and from the host": r"move_rows|read_rows|exchange_places",
    "slots of caches": r"claim_slots|find_cached",
    "lookup": r"pooled_lookup|embedding.*forward",
    "row update": r"rowwise_update|::update_kernel"
    r"|embedding.*backward|split_embedding|find_long_segments",
    "cross layers": r"low_rank_cross|::product_kernel|multiply_and_sum|sum_partials",
    "matrix products": r"nvjet|gemm|cutlass|splitK|linear_to_one|cublas",
    "dense update": r"dense_update|multi_tensor",
    "copies": r"memcpy|memset|CatArray|copy",
    "other": r"",
}
"""A kernel is of the first stage whose pattern its name has."""
_COLOURS = ("C6", "C3", "C4", "black", "gold", "C0", "C1", "C2", "C9", "C5", "C8", "C7")
GRAPH_KERNELS = 20
"""A launch of as many is a graph."""
LABELLED_PART = 0.06
"""Part of the step's time from which on a kernel gets its name."""


class Kernel(NamedTuple):
    """A kernel or copy that ran on a GPU; times in microseconds of the trace."""

    name: str
    stream: int
    start: float
    duration: float
    launch: int

    @property
    def stage(self) -> str:
        return stage_of(self.name)


def stage_of(name: str) -> str:
    """The stage of a kernel of that name."""
    return next(s for s, known in STAGES.items() if re.search(known, name, re.IGNORECASE))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """All kernels and copies of a trace, by their start."""
    found = [
        Kernel(e["name"], e["tid"], e["ts"], e["dur"], e["args"]["correlation"])
        for e in trace["traceEvents"]
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def one_step(kernels: list[Kernel], num_steps: int) -> list[Kernel]:
    """The kernels of a step in the middle: from one graph to the next, or, where there are none, of
    one part in ``num_steps`` of the time."""
    sizes = collections.Counter(kernel.launch for kernel in kernels)
    begins = [k.start for k in kernels if sizes.pop(k.launch, 0) >= GRAPH_KERNELS]
    if len(begins) > 1:
        middle = (len(begins) - 1) // 2
        first, last = begins[middle], begins[middle + 1]
    else:
        begin, end = kernels[0].start, max(k.start + k.duration for k in kernels)
        part = (end - begin) / num_steps
        first, last = begin + num_steps // 2 * part, begin + (num_steps // 2 + 1) * part
    return [kernel for kernel in kernels if first <= kernel.start < last]


def times_of(kernels: list[Kernel]) -> dict[str, tuple[float, float]]:
    """For each stage that there is the microseconds in which its kernels run, and those of them in
    which no other stage's do, so that nothing hides it."""
    edges = sorted(
        edge
        for kernel in kernels
        for edge in (
            (kernel.start, 1, kernel.stage),
            (kernel.start + kernel.duration, -1, kernel.stage),
        )
    )
    running: collections.Counter[str] = collections.Counter()
    found = {stage: (0.0, 0.0) for stage in STAGES if any(k.stage == stage for k in kernels)}
    reached = 0.0
    for time, change, stage in edges:
        now = [name for name, count in running.items() if count]
        for name in now:
            busy, alone = found[name]
            passed = time - reached
            found[name] = busy + passed, alone + (passed if len(now) == 1 else 0.0)
        running[stage] += change
        reached = time
    return found


def lanes_of(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each stream, streams in the order in which they begin."""
    by_stream: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        by_stream.setdefault(kernel.stream, []).append(kernel)
    return list(by_stream.values())


def draw(kernels: list[Kernel], picture: Path, title: str) -> None:
    """Draw a step to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = lanes_of(kernels)
    start = kernels[0].start
    span = max(kernel.start + kernel.duration for kernel in kernels) - start
    colours = dict(zip(STAGES, _COLOURS, strict=True))
    figure = Figure(figsize=(16, 1.6 + 0.75 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    totals = dict.fromkeys(STAGES, 0.0)
    for place, lane in enumerate(lanes):
        for kernel in lane:
            at, width = (kernel.start - start) / 1e3, kernel.duration / 1e3
            totals[kernel.stage] += kernel.duration
            axes.broken_barh(
                [(at, width)], (place - 0.4, 0.8), color=colours[kernel.stage], linewidth=0
            )
            if kernel.duration > LABELLED_PART * span:
                axes.text(
                    at + width / 2,
                    place,
                    _short(kernel.name, int(150 * kernel.duration / span)),
                    ha="center",
                    va="center",
                    fontsize=8,
                )
    axes.set_yticks(range(len(lanes)), [_label(lane) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, span / 1e3)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title)
    legend = [
        Patch(color=colours[stage], label=f"{stage}: {totals[stage] / 1e3:.2f} ms")
        for stage in STAGES
        if totals[stage]
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(picture, dpi=110)


def _label(lane: list[Kernel]) -> str:
    """The stream, and what it does longest."""
    times = dict.fromkeys(STAGES, 0.0)
    for kernel in lane:
        times[kernel.stage] += kernel.duration
    busy = sum(times.values()) / 1e3
    return f"{max(times, key=times.__getitem__)}\nstream {lane[0].stream}, {busy:.2f} ms"


def _short(name: str, width: int) -> str:
    """The name without what is the same in many, cut to ``width`` letters."""
    name = re.sub(r"^(void )?(at::native::|torchembed::)?(\(anonymous namespace\)::)?_?", "", name)
    name = re.sub(r"[<(].*|_kernel$|_sm90.*|ncclDevKernel_", "", name)
    return name[:width]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--num-steps", type=int, default=5, help="steps in the trace")
    arguments = parser.parse_args()
    kernels = kernels_of(json.loads(arguments.trace.read_text()))
    if not kernels:
        raise SystemExit(f"{arguments.trace} holds no kernels of a GPU")
    step = one_step(kernels, arguments.num_steps)
    draw(step, arguments.picture, f"One step: {arguments.trace.stem}")
    span = max(kernel.start + kernel.duration for kernel in step) - step[0].start
    print(f"{arguments.trace.stem}: {span / 1e3:.3f} ms; milliseconds of each stage, and of these "
          "without another one")  # fmt: skip
    for stage, (busy, alone) in times_of(step).items():
        print(f"  {stage:26} {busy / 1e3:7.3f} {alone / 1e3:7.3f}")


if __name__ == "__main__":
    main()
