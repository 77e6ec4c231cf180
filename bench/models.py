"""The zoo of models and habits of ``tests/zoo``, by a plain loop, by a compiled one, by a pipeline.

``python -m bench.models`` prints a line for each entry: how the pipeline trained it, whether losses
and weights are equal to the plain loop's bit for bit, the milliseconds of a step of each, and with
``--busy`` the share of the pipeline's step in which the GPU is busy. It runs in a checkout, where
the zoo is.

``torchrun --standalone --nproc-per-node 2 -m bench.models`` does so on two ranks: models are
sharded by ``shard_embeddings``, each rank trains batches of its own, and rank 0 prints the worst
outcome and the longest times. An entry that fails on a rank is said, and the others are measured.
"""

import contextlib
import dataclasses
import gc
import importlib
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import tyro

from bench.models_on_ranks import is_first, is_one_of_several, rows_of_ranks
from bench.report.result_file import Row, write_results
from bench.step.profile import profile_steps
from tests.zoo.entries import Case, Entry
from tests.zoo.harness import NUM_STEPS, Kind, batches_of, made, outcome_of, plain_step
from tests.zoo.sizes import Sizes, large, tiny
from torchembed.core import ranks
from torchembed.training import TrainPipeline

SIZES: dict[str, Callable[[torch.device], Sizes]] = {"large": large, "tiny": tiny}
SYSTEMS = ("plain", "compiled", "pipeline")
_WARM_UP_STEPS, _PROFILED_STEPS = 12, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurements."""

    entries: str = "."
    """A regular expression; entries are measured whose ``family/name`` it finds."""
    part: str = "1/1"
    """``2/3``: the second of three parts of these entries, which are dealt out in turn."""
    zoo: str = "tests.zoo.zoo"
    """The module that has the ``ENTRIES``."""
    device: str = "cuda"
    size: str = "large"
    """``large``: 2048 samples, 20 features, 1 M rows of 64 columns; ``tiny``: those of tests."""
    systems: tuple[str, ...] = ()
    """Times to measure: ``plain``, ``compiled`` and ``pipeline`` where none is given, on several
    ranks without ``compiled``."""
    backend: str = "inductor"
    """The backend of ``torch.compile``."""
    seconds: float = 1.0
    """Time to measure each loop for, in five parts."""
    busy: bool = False
    """Profile the pipeline's step, too, on a GPU. A process that has used the profiler launches
    more slowly ever after, so that times of further entries are too long in such a run."""
    entry_seconds: float = 180.0
    """Limit on an entry, on several ranks."""
    grace_seconds: float = 20.0
    """How long a rank may still take for an entry that has failed on another one."""
    budget_seconds: float | None = None
    """Leave out what has not begun by then."""
    output: Path | None = None
    """JSON to write the rows to."""


def measured(
    entry: Entry, sizes: Sizes, config: Config, note: Callable[[Row], object] = lambda row: None
) -> Row:
    """The row of ``entry``; ``note`` is given what there is of it. On several ranks one that cannot
    go on as the others do returns."""
    row: Row = {"bench": "models", "family": entry.family, "entry": entry.name}
    try:
        with _repeatable():
            outcome = outcome_of(entry, sizes)
    except Exception as error:  # noqa: BLE001 - said, and the other entries are measured
        _free_memory()
        return {**row, "not_printed_because": _problem(error)}
    row |= {"outcome": outcome.kind.value, "said": outcome.words}
    note(row)
    if outcome.kind is Kind.RAISES and is_one_of_several():
        return row
    for system in config.systems:
        _free_memory()
        try:
            with _stepping(system, entry, sizes, config) as step:
                row[f"{system}_ms"] = _milliseconds(step, config.seconds, sizes.device)
                if config.busy and system == "pipeline" and sizes.device.type == "cuda":
                    busy_ms = profile_steps(step, _PROFILED_STEPS).gpu_busy_ms
                    row["gpu_busy"] = min(busy_ms / row["pipeline_ms"], 1.0)
        except Exception as error:  # noqa: BLE001 - likewise
            row[f"{system}_failed"] = _problem(error)
            if is_one_of_several():
                break
        note(row)
    _free_memory()
    return row


def _measured_on_a_rank(config: Config, name: str, note: Callable[[Row], object]) -> Row:
    """:func:`measured` in a process of its own."""
    return measured(_entries(config)[name], _sizes(config), config, note)


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """A context in which operations give the same bits at each call, where torch can do that."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _stepping(
    system: str, entry: Entry, sizes: Sizes, config: Config
) -> Iterator[Callable[[], object]]:
    """A function that takes one step of the entry's loop, which repeats its batches."""
    case, batches = made(entry, sizes), batches_of(entry, sizes, NUM_STEPS)
    source, numbers = itertools.cycle(batches), itertools.count()

    def around(take: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            number = next(numbers)
            case.before_step(number)
            case.after_step(number, take())

        return step

    if system == "pipeline":
        with TrainPipeline(
            case.model, case.loss_fn, case.optimizers, autocast=case.autocast, capture=True
        ) as pipeline:
            yield around(lambda: pipeline.progress(source).loss)
        return
    called = case if system == "plain" else _compiled(case, config.backend)
    yield around(lambda: plain_step(called, next(source)))


def _compiled(case: Case, backend: str) -> Case:
    model: Any = torch.compile(case.model, backend=backend)
    return dataclasses.replace(case, model=model)


def _milliseconds(step: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The median milliseconds of a step over five parts, once it is warm; every rank calls it."""
    for _ in range(_WARM_UP_STEPS):
        step()
    estimate = _seconds(step, 4, device) / 4
    # Ranks take equally many steps.
    count = ranks.from_first_rank(max(1, int(seconds / 5 / max(estimate, 1e-6))))
    return statistics.median(_seconds(step, count, device) for _ in range(5)) / count * 1e3


def _seconds(step: Callable[[], object], count: int, device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def line(row: Row) -> str:
    """``row`` as a line of the table."""

    def number(key: str, form: str) -> str:
        return form.format(row[key]) if key in row else "-"

    plain, ours = row.get("plain_ms"), row.get("pipeline_ms")
    parts = (
        f"{row['entry']:<60.60}",
        f"{number('plain_ms', '{:.3f}'):>8}",
        f"{number('compiled_ms', '{:.3f}'):>8}",
        f"{number('pipeline_ms', '{:.3f}'):>8}",
        f"{plain / ours:5.1f}x" if plain and ours else f"{'-':>6}",
        f"{number('gpu_busy', '{:.0%}'):>5}",
        row.get("outcome", row.get("not_printed_because", "")),
        row.get("said", ""),
        *(f"{key}: {row[key]}" for key in row if key.endswith("_failed")),
    )
    return "  ".join(filter(None, parts))


def _sizes(config: Config) -> Sizes:
    return SIZES[config.size](torch.device(config.device))


def _entries(config: Config) -> dict[str, Entry]:
    """The entries to measure, by name."""
    number, num_parts = (int(text) for text in config.part.split("/"))
    if not 1 <= number <= num_parts:
        raise ValueError(f"part must be one of several, as 2/3, got {config.part!r}")
    chosen = [
        entry
        for entry in importlib.import_module(config.zoo).ENTRIES.values()
        if re.search(config.entries, f"{entry.family}/{entry.name}")
    ]
    return {entry.name: entry for entry in chosen[number - 1 :: num_parts]}


def _within_budget(names: Iterable[str], budget_seconds: float | None) -> Iterator[str]:
    """The names whose entries begin in time; says which do not."""
    end = time.perf_counter() + (budget_seconds or float("inf"))
    for name in names:
        if time.perf_counter() <= end:
            yield name
        elif is_first():
            print(f"{name:<60}  left out, the budget is spent")


def _rows(config: Config) -> Iterator[Row]:
    entries = _entries(config)
    names = _within_budget(entries, config.budget_seconds)
    if is_one_of_several():
        yield from rows_of_ranks(
            _measured_on_a_rank,
            config,
            names,
            entry_seconds=config.entry_seconds,
            grace_seconds=config.grace_seconds,
        )
    else:
        sizes = _sizes(config)
        yield from (measured(entries[name], sizes, config) for name in names)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.size not in SIZES:
        raise ValueError(f"size must be one of {sorted(SIZES)}, got {config.size!r}")
    if not config.systems:
        systems = ("plain", "pipeline") if is_one_of_several() else SYSTEMS
        config = dataclasses.replace(config, systems=systems)
    if is_first():
        print(
            f"{'entry':<60}  {'plain':>8}  {'compiled':>8}  {'pipeline':>8}  faster   busy  outcome"
        )
    rows: list[Row] = []
    for row in _rows(config):
        rows.append(row)
        if is_first():
            print(line(row), flush=True)
            if config.output is not None:
                write_results(config.output, rows)


if __name__ == "__main__":
    main()
