"""Prints the tables of ``bench.step.train_step``."""

from bench.report.result_file import Row


def print_row(row: Row, rows: list[Row]) -> None:
    """Print a line of times, the last of ``rows``, with the ratio to torchembed in the same
    setting."""
    if len(rows) == 1:
        print(
            "batch ids      system                  ms median (min to max)     samples/s  ratio"
            "  floor  stalls  peak GB  set-up s"
        )
    head = _head(row)
    if "ms_median" not in row:
        print(f"{head} not printed: {row['not_printed_because']}")
        return
    same = ("batch_per_gpu", "ids")
    ours = next(
        (
            r for r in rows
            if r["system"] == "torchembed" and "ms_median" in r
            and all(r[key] == row[key] for key in same)
        ),
        None,
    )  # fmt: skip
    if ours is not None:
        row["times_torchembed"] = row["ms_median"] / ours["ms_median"]
    line = (
        f"{head} {row['ms_median']:8.3f} ({row['ms_min']:.3f} to {row['ms_max']:.3f})"
        f" {row['samples_per_second']:12.0f} {_optional(row, 'times_torchembed', 6, 2)}"
        f" {_optional(row, 'floor_fraction', 6, 2)} {row['input_stalls']:7d}"
        f" {_optional(row, 'peak_memory_gb', 8, 1)} {row['set_up_seconds']:9.1f}"
    )
    print(line, flush=True)


def print_profile(row: Row, *, is_first: bool) -> None:
    """Print a line of what the profile of a step says."""
    if is_first:
        print("batch ids      system                   busy ms  kernels  launches  waits")
    if "not_profiled_because" in row:
        print(f"{_head(row)} not profiled: {row['not_profiled_because']}", flush=True)
        return
    print(
        f"{_head(row)} {row['gpu_busy_ms']:9.3f} {row['kernels']:8.0f} {row['launches']:9.0f}"
        f" {row['host_waits']:6.1f}",
        flush=True,
    )
    predicted = row.get("predicted_ms", {})
    stages = [
        f"{stage} {milliseconds:.3f}" + (f" ({predicted[stage]:.3f})" if stage in predicted else "")
        for stage, milliseconds in row.get("alone_ms", {}).items()
        if milliseconds
    ]
    if stages:
        print(f"{'':14} ms one after the other (predicted): {', '.join(stages)}", flush=True)


def _head(row: Row) -> str:
    return f"{row['batch_per_gpu']:5d} {row['ids']:8} {row['system']:22}"


def _optional(row: Row, key: str, width: int, digits: int) -> str:
    return f"{row[key]:{width}.{digits}f}" if key in row else f"{'-':>{width}}"
