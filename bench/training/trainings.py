"""Trainings of recipes, several at a time, and the gates that their means must pass."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, NoReturn

from bench.report.result_file import Row, write_results


class Trained(NamedTuple):
    """The trainings that have ended."""

    rows: list[Row]
    """A row of each that succeeded, in the order in which they ended."""
    failed: list[str]
    """What each of the others said."""


def train_all(
    trainings: Iterable[Callable[[], Row]],
    *,
    num_processes: int,
    line: Callable[[Row], str],
    output: Path | None,
) -> Trained:
    """Run trainings in the order given, and print a line of each as it ends.

    Args:
        trainings: each gives its row, or raises ``RuntimeError``, which ends no other training.
        num_processes: how many run at a time.
        line: from a row to the line to print.
        output: JSON to write the rows to, after each training; None to write none.
    """
    rows, failed = list[Row](), list[str]()
    with ThreadPoolExecutor(max_workers=num_processes) as pool:
        for run in as_completed([pool.submit(training) for training in trainings]):
            try:
                row = run.result()
            except RuntimeError as error:
                failed.append(str(error))
                print(error, flush=True)
                continue
            rows.append(row)
            print(line(row), flush=True)
            if output is not None:
                write_results(output, rows)
    return Trained(rows, failed)


def exit_by_gates(missed: Sequence[str]) -> NoReturn:
    """End the process: print ``missed`` and fail, or say that there is none."""
    print("\n".join(missed) if missed else "passes the gates")
    raise SystemExit(1 if missed else 0)
