"""Prints the table of ``bench.step.train_step``."""

from bench.report.result_file import Row


def print_row(row: Row, rows: list[Row]) -> None:
    """Print a line of the table, with the ratio to torchembed in the same setting."""
    if len(rows) == 1:
        print(
            "batch ids      system              ms median (min to max)     samples/s  ratio  floor"
            "  busy ms  kernels  launches  waits  stalls  peak GB  set-up s"
        )
    head = f"{row['batch_per_gpu']:5d} {row['ids']:8} {row['system']:18}"
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
        f" {_optional(row, 'floor_fraction', 6, 2)} {_optional(row, 'gpu_busy_ms', 8, 3)}"
        f" {_optional(row, 'kernels', 8, 0)} {_optional(row, 'launches', 9, 0)}"
        f" {_optional(row, 'host_waits', 6, 1)} {row['input_stalls']:7d}"
        f" {_optional(row, 'peak_memory_gb', 8, 1)} {row['set_up_seconds']:9.1f}"
    )
    print(line, flush=True)
    predicted = row.get("predicted_ms", {})
    stages = [
        f"{stage} {milliseconds:.3f}" + (f" ({predicted[stage]:.3f})" if stage in predicted else "")
        for stage, milliseconds in row.get("alone_ms", {}).items()
        if milliseconds
    ]
    if stages:
        print(f"{'':14} ms one after the other (predicted): {', '.join(stages)}", flush=True)


def _optional(row: Row, key: str, width: int, digits: int) -> str:
    return f"{row[key]:{width}.{digits}f}" if key in row else f"{'-':>{width}}"
