"""Writes the tables of ``bench/results/*.json`` into ``docs/performance.md``, and one into README.

``python -m bench.report.tables``. The text between the two markers of each page is replaced; a test
holds that it agrees with the files.
"""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.report.result_file import Row, was_timed_first

Key: TypeAlias = tuple[Any, ...]
"""Values of a row, strings and numbers as JSON has them, that distinguish the lines of a table."""

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- written by bench.report.tables -->", "<!-- end of what it writes -->"

_OF_SETTING = ("file", "num_gpus", "gpu", "batch_per_gpu", "ids", "optimizer", "max_rows")
"""What distinguishes the settings of steps; the file, too, since what is compared is of one run."""
_PEERS = {"torchrec": "TorchRec", "torchrec_tuned": "tuned TorchRec"}
_CHOICES = {
    "torchembed": "usual",
    "torchembed_bf16_rows": "rows in bfloat16",
    "torchembed_fp8_products": "products of wide layers in 8 bits",
}
_DROP_INS = {
    "drop_in": "our sharders",
    "drop_in_pipeline": "and our pipeline",
    "torchrec_bf16": "TorchRec, bf16",
    "drop_in_pipeline_bf16": "our sharders and pipeline, bf16",
}


def tables(results: Path) -> str:
    """The tables of all files of a folder, as Markdown."""
    rows = _rows_by_bench(results)
    makers = [
        ("train_step", _train_step),
        ("train_step", _drop_ins),
        ("train_step", _choices),
        ("kernels", _kernels),
        ("shapes", _shapes),
        ("dense", _dense),
    ]
    written = (make(rows[bench]) for bench, make in makers if bench in rows)
    return "\n".join(filter(None, written))


def headline(results: Path) -> str:
    """The table of README: steps of the usual batch, and TorchRec's in the same run, where nothing
    was profiled before it was timed; of several runs the one in which TorchRec does best."""
    usual = {"batch_per_gpu": 8192, "ids": "uniform", "optimizer": "adagrad", "max_rows": 8_000_000}
    rows = filter(was_timed_first, _rows_by_bench(results)["train_step"])
    found = _by(rows, ("file", "num_gpus", "gpu"), **usual)
    compared: dict[Key, dict[str, Row]] = {}
    for (_, *gpus), systems in found.items():
        if _is_shown(systems, "torchembed") and _is_shown(systems, "torchrec"):
            runs = [systems, compared.get(tuple(gpus), systems)]
            compared[tuple(gpus)] = min(runs, key=_times_as_fast)
    used = [systems["torchembed"] for systems in compared.values()]
    precision = _only(row["precision"] for row in used)
    columns = {
        "torchembed": f"torchembed, {precision}",
        "torchembed_tf32": "torchembed, tf32",
        "torchrec": "TorchRec, tf32",
    }
    shown = [name for name in columns if any(_is_shown(s, name) for s in compared.values())]
    lines = []
    for (num_gpus, gpu), systems in compared.items():
        medians = {name: systems[name]["ms_median"] for name in shown if _is_shown(systems, name)}
        times = [f"{medians[name]:.2f}" if name in medians else "" for name in shown]
        lines.append([f"{num_gpus} {gpu}", *times, f"{_times_as_fast(systems):.1f}"])
    return _text(
        "Milliseconds for a train step of MLPerf's DLRM-DCNv2 with 8192 samples on each GPU, "
        "tables cut to 8 M rows, uniform ids and Adagrad. The last column divides TorchRec's time "
        f"in tf32 by ours in {precision}, both of one run: of several runs, the one where TorchRec "
        f"does best ({_files(used)}):",
        ["GPUs", *(columns[name] for name in shown), "times as fast"],
        lines,
    )


def _times_as_fast(systems: Mapping[str, Row]) -> float:
    return systems["torchrec"]["ms_median"] / systems["torchembed"]["ms_median"]


PAGES = {ROOT / "README.md": headline, ROOT / "docs/performance.md": tables}
"""Each page that is written, and what gives its text."""


def _rows_by_bench(results: Path) -> dict[str, list[Row]]:
    """All rows of the files of a folder, each with its file, commit and GPU."""
    rows: dict[str, list[Row]] = {}
    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        about = {
            "gpu": result["hardware"]["gpu"],
            "file": file.name,
            "commit": result["commit"],
        }
        for row in result["rows"]:
            rows.setdefault(row["bench"], []).append(about | row)
    return rows


def with_tables(page: str, written: str) -> str:
    """``page`` with ``written`` between the markers.

    Raises:
        ValueError: where it has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must hold the lines {BEGIN} and {END}; add them")
    return f"{before}{BEGIN}\n\n{written}\n{END}{after}"


def _train_step(rows: Sequence[Row]) -> str:
    """A line for each setting that torchembed was measured in."""
    precision = _only(row["precision"] for row in rows if row["system"] == "torchembed")
    lines = []
    for key, systems in _by(rows, _OF_SETTING).items():
        shown = [name for name in ("torchembed", "torchembed_tf32") if _is_shown(systems, name)]
        if not shown:
            continue
        ours = systems[shown[0]]
        peers = {name: systems[name]["ms_median"] for name in _PEERS if _is_shown(systems, name)}
        way = ", push" if ours.get("transport") == "push" else ""
        if ours.get("wire") == "fp8":
            way += ", 8 bits between GPUs"
        line = [f"{_setting(key)}{way}{_mark(ours)}"]
        line.append(_spread(systems.get("torchembed", {})))
        line.append(_spread(systems.get("torchembed_tf32", {})))
        line += [_spread(systems.get(name, {})) for name in _PEERS]
        line.append(f"{min(peers.values()) / ours['ms_median']:.1f}" if peers else "")
        line.append(f"{ours['floor_fraction']:.2f}" if "floor_fraction" in ours else "")
        lines.append(line)
    head = ["GPUs, samples", f"torchembed {precision}", "torchembed tf32"]
    head += [*_PEERS.values(), "times as fast", "floor / ours"]
    return _text(
        "Milliseconds for a train step of MLPerf's DLRM-DCNv2, median (least to most), by "
        f"`torchrun -m bench.step.train_step` ({_files(rows)}). TorchRec runs in tf32. *Times as "
        f"fast* divides its better time by ours of the same run, in {precision}, or in tf32 if "
        "only that was measured. *Floor / ours* divides the least time that the bytes, FLOPs and "
        f"links of the step allow by ours. {_OF_MARK}:",
        head,
        lines,
    )


def _drop_ins(rows: Sequence[Row]) -> str:
    """A line for each setting in which TorchRec's model was measured with our parts in it."""
    lines, used = [], []
    for key, systems in _by(rows, _OF_SETTING).items():
        peers = {name: systems[name]["ms_median"] for name in _PEERS if _is_shown(systems, name)}
        if not peers or not any(_is_shown(systems, name) for name in _DROP_INS):
            continue
        line = [f"{_setting(key)}{_mark(next(iter(systems.values())))}"]
        line += [_spread(systems.get(name, {})) for name in _PEERS]
        for name in _DROP_INS:
            row = systems.get(name, {})
            is_shown = _is_shown(systems, name)
            times = f", {min(peers.values()) / row['ms_median']:.1f} times" if is_shown else ""
            line.append(_spread(row) + times)
        lines.append(line)
        used += [row for name, row in systems.items() if name in _DROP_INS]
    if not lines:
        return ""
    return _text(
        "Milliseconds for the same step of TorchRec's own model: unchanged, with our sharders in "
        "place of TorchRec's, and with our pipeline too, in tf32 or in bf16 by torch.autocast. "
        "*1.2 times* means 1.2 times as fast as TorchRec's better time in tf32 of the same run "
        f"({_files(used)}):",
        ["GPUs, samples", *_PEERS.values(), *_DROP_INS.values()],
        lines,
    )


def _choices(rows: Sequence[Row]) -> str:
    """A line for each setting in which choices that save bytes or FLOPs were measured."""
    lines, used = [], []
    for key, systems in _by(rows, _OF_SETTING).items():
        if not all(_is_shown(systems, name) for name in ("torchembed", "torchembed_bf16_rows")):
            continue
        lines.append([_setting(key), *(_spread(systems.get(name, {})) for name in _CHOICES)])
        used.append(systems["torchembed"])
    if not lines:
        return ""
    return _text(
        "Milliseconds for the same step with choices that save bytes or time of products, each "
        f"beside the usual step of its run ({_files(used)}):",
        ["GPUs, samples", *_CHOICES.values()],
        lines,
    )


_OF_MARK = (
    "† marks a run whose lines, all but the first, were timed after the process had used the "
    "profiler; from then on it launches kernels and graphs more slowly"
)


def _mark(row: Row) -> str:
    """The mark of a line that was not timed before all profiles."""
    return "" if was_timed_first(row) else " †"


def _setting(key: Key) -> str:
    """The setting of a line in words, from the values of ``_OF_SETTING``."""
    _, num_gpus, gpu, size, ids, optimizer, max_rows = key
    cut = "" if max_rows is None else f", {max_rows / 1e6:g} M rows a table"
    return f"{num_gpus} {gpu}, {size} each{cut}, {ids}, {optimizer}"


def _is_shown(systems: dict[str, Row], name: str) -> bool:
    return "ms_median" in systems.get(name, {})


def _spread(row: Row) -> str:
    if "ms_median" not in row:
        return ""
    return f"{row['ms_median']:.2f} ({row['ms_min']:.2f} to {row['ms_max']:.2f})"


def _kernels(rows: Sequence[Row]) -> str:
    """A line for each batch: the forward, and the backward with each optimizer."""
    lines, found = [], _by(rows, ("batch_per_gpu", "ids"), system="torchembed")
    stages = list(dict.fromkeys((row["stage"], row["optimizer"]) for row in rows))
    for size, ids in found:
        cells = []
        for stage, optimizer in stages:
            same = {"batch_per_gpu": size, "ids": ids, "stage": stage, "optimizer": optimizer}
            matching = [
                row for row in rows if row["system"] == "torchembed" and same.items() <= row.items()
            ]
            cells.append(_microseconds(matching[0]) if matching else "")
        lines.append([f"{size} {ids}", *cells])
    head = ["batch", *(stage if rule is None else f"{stage}, {rule}" for stage, rule in stages)]
    return _text(
        "Microseconds for lookups and row updates of MLPerf's tables, cut to 8 M rows, and in "
        f"brackets the ratio to FBGEMM's time in the same run, by `python -m bench.kernels.gpu` "
        f"({_files(rows)}) on one {_only(row['gpu'] for row in rows)}. An update is the part of a "
        f"backward that needs the gradient{_rows_alone(rows)}:",
        head,
        lines,
    )


def _rows_alone(rows: Sequence[Row]) -> str:
    """Compare updates with bare reads and writes of their rows, for ids that hardly repeat: the
    sums of repeated rows' gradients are not in the bare time."""
    uniform = [row for row in rows if row["ids"] == "uniform"]
    found = [row["of_rows_alone"] for row in uniform if "of_rows_alone" in row]
    if not found:
        return ""
    return (
        f". With uniform ids it takes {min(found):.2f} to {max(found):.2f} times as long as a "
        "kernel that only reads and writes the same rows and states"
    )


def _microseconds(row: Row) -> str:
    ratio = f" ({row['of_fbgemm']:.2f})" if "of_fbgemm" in row else ""
    return f"{row['microseconds']:.0f}{ratio}"


def _shapes(rows: Sequence[Row]) -> str:
    """A line for each shape and optimizer: the forward, and all of a step."""
    ours = [row for row in rows if row["system"] == "torchembed"]
    lines = [
        [f"{row['shape']}, {row['optimizer']}", *(_stage(row, s) for s in ("forward", "in_all"))]
        for row in ours
    ]
    return _text(
        f"Microseconds for lookups and updates of {_only(row['tables'] for row in ours)}, Zipf "
        "ids, and in brackets the ratio to FBGEMM's time in the same run, by `python -m "
        f"bench.kernels.shapes` ({_files(ours)}) on one {_only(row['gpu'] for row in ours)}:",
        ["ids a bag, samples, pooling, optimizer", "forward", "forward, backward and update"],
        lines,
    )


def _stage(row: Row, stage: str) -> str:
    """A stage's time, and in brackets over FBGEMM's; empty where what it computed was wrong."""
    if f"{stage}_microseconds" not in row:
        return ""
    ratio = f" ({row[f'{stage}_of_fbgemm']:.2f})" if f"{stage}_of_fbgemm" in row else ""
    return f"{row[f'{stage}_microseconds']:.0f}{ratio}"


def _dense(rows: Sequence[Row]) -> str:
    """A line for each batch and precision of the dense part, then its optimizers."""
    names = {
        "torch": "PyTorch",
        "torch.compile": "torch.compile",
        "torchembed": "torchembed",
        "torchembed, side stream": "torchembed, weight gradients on a separate stream",
    }
    passes = [row for row in rows if row["part"] == "forward and backward"]
    updates = [row for row in rows if row["part"] == "optimizer" and row["precision"] == "fp32"]
    lines = []
    for (precision, size), systems in _by(passes, ("precision", "batch_per_gpu")).items():
        cells = [f"{systems[name]['ms_median']:.2f}" if name in systems else "" for name in names]
        lines.append([f"{size} samples, {precision}", *cells])
    for (optimizer,), systems in _by(updates, ("optimizer",)).items():
        cells = [f"{systems[name]['ms_median']:.2f}" if name in systems else "" for name in names]
        lines.append([f"{optimizer} over 16 M parameters", *cells])
    return _text(
        "Milliseconds for the dense part of MLPerf's DLRM-DCNv2, forward and backward in a CUDA "
        f"graph, and for its optimizers, by `python -m bench.dense.passes` ({_files(rows)}) on one "
        f"{_only(row['gpu'] for row in rows)}:",
        ["", *names.values()],
        lines,
    )


def _by(rows: Iterable[Row], keys: Sequence[str], **equal: object) -> dict[Key, dict[str, Row]]:
    """The rows of each value of ``keys``, by system; of equal ones the first."""
    found: dict[Key, dict[str, Row]] = {}
    for row in rows:
        if equal.items() <= row.items():
            systems = found.setdefault(tuple(row[key] for key in keys), {})
            systems.setdefault(row["system"], row)
    return found


def _only(values: Iterable[str]) -> str:
    """The one value that all rows of a table share.

    Raises:
        ValueError: where they have several.
    """
    found = sorted(set(values))
    if len(found) != 1:
        raise ValueError(f"bench/results must hold one of {', '.join(found)} in a table; move rows")
    return found[0]


def _files(rows: Sequence[Row]) -> str:
    """Name the result files of ``rows`` and the commits they were measured at."""
    commits = dict.fromkeys((row["file"], row["commit"][:7]) for row in rows)
    return ", ".join(f"`bench/results/{name}` of {commit}" for name, commit in commits)


def _text(sentence: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join(
        [textwrap.fill(sentence, 100), "", *(f"| {' | '.join(line)} |" for line in table), ""]
    )


def main() -> None:
    for page, text_of in PAGES.items():
        page.write_text(with_tables(page.read_text(), text_of(ROOT / "bench/results")))


if __name__ == "__main__":
    main()
