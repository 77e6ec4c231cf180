"""Rates of a batch's way from MLPerf's files to a GPU: each stage alone, and all together.

``python -m bench.data.input_stages`` writes files of random ids and reads them by 1 and by 8
processes, which share the files as ranks do, with several numbers of threads each. Stages are
reading to pageable memory, reading to page-locked memory, the copy from there to the GPU, and the
last two together. Files are in memory (a tmpfs, or the system's cache) and on a disk, of which the
system has kept nothing. Every pass maps the files anew, since in training no page is read twice
before all others are. All processes copy to one GPU; without one, reading alone is measured.
"""

import dataclasses
import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import tyro

from bench.data.reader import batch_bytes, random_rows, write_mlperf
from bench.report.result_file import Row, write_results
from torchembed.core.trees import tensors_in
from torchembed.data import (
    INT_NAMES,
    MLPERF_HOTNESS,
    MLPERF_TABLE_SIZES,
    BackgroundLoader,
    Batch,
    MlperfDays,
)

_WAIT_SECONDS = 120.0
"""The longest that a process waits for the others."""
_READ, _LOCKED, _COPY, _ALL = "read", "read to page-locked", "copy", "read and copy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Files to read, and how."""

    num_rows: int = 1 << 20
    """Of 912 bytes each."""
    batch_size: int = 8192
    """Of each process."""
    num_threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Threads of one process that build batches."""
    num_threads_of_several: tuple[int, ...] = (1, 2)
    """Threads of each of several processes."""
    num_processes: int = 8
    """Processes of which one, and all, are measured."""
    seconds: float = 0.5
    """Passes are repeated for as long; those over files on disk are one each."""
    step_ms: float = 2.8
    """The time of a step, by which the needed rate is computed."""
    memory_folder: Path = Path("/dev/shm")
    disk_folder: Path | None = None
    """A folder on a disk; the system's for temporary files where None."""
    output: Path | None = None
    """JSON to write the rows to."""


class Case(NamedTuple):
    """One measurement."""

    place: str
    """Of the files: ``memory`` or ``disk``."""
    stage: str
    num_processes: int
    num_threads: int


class Passed(NamedTuple):
    """What one process has done in a case."""

    num_bytes: int
    """Of batches."""
    seconds: float
    cpu_seconds: float


def cases(config: Config, *, has_gpu: bool) -> list[Case]:
    """All measurements, with the disk's last."""
    of_place = {"memory": (_READ,), "disk": (_READ,)}
    if has_gpu:
        of_place = {"memory": (_READ, _LOCKED, _COPY, _ALL), "disk": (_ALL,)}
    several = config.num_processes, config.num_threads_of_several
    found = [
        # Copies alone read nothing.
        Case(place, stage, num_processes, 1 if stage == _COPY else num_threads)
        for place, stages in of_place.items()
        for num_processes, of_each in ((1, config.num_threads), several)
        for stage in stages
        for num_threads in of_each
    ]
    return list(dict.fromkeys(found))


class Passes:
    """Passes of one process over the files of a folder, from a stage's first byte to its last.

    Args:
        config: of the run.
        folder: the files.
        rank: number of the process.
    """

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        self._config, self._folder, self._rank = config, folder, rank
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._targets: list[list[torch.Tensor]] = []
        """Two batches on the GPU, which take copies in turn."""
        self._copied: list[torch.cuda.Event] = []

    def measure(self, case: Case, *, only_one: bool) -> Passed:
        """Passes for the seconds of ``config``, or ``only_one``; opening the files is not timed."""
        total = Passed(0, 0.0, 0.0)
        made = list(itertools.islice(self._opened(case), 4)) if case.stage == _COPY else None
        while total.num_bytes == 0 or not (only_one or total.seconds >= self._config.seconds):
            batches = made if made is not None else self._opened(case)
            start, cpu_start = time.perf_counter(), time.process_time()
            num_bytes = sum(self._take(case, batch) for batch in batches)
            if self._stream is not None:
                self._stream.synchronize()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            total = Passed(
                total.num_bytes + num_bytes,
                total.seconds + seconds,
                total.cpu_seconds + cpu_seconds,
            )
        return total

    def _opened(self, case: Case) -> Iterator[Batch]:
        """The batches of this rank, of files that are open already."""
        source = MlperfDays(
            self._folder,
            batch_size=self._config.batch_size,
            table_sizes=MLPERF_TABLE_SIZES,
            rank=self._rank,
            world_size=case.num_processes,
        )
        return iter(
            BackgroundLoader(
                source,
                num_threads=case.num_threads,
                num_ahead=2 * case.num_threads,
                pin_memory=case.stage != _READ,
            )
        )

    def _take(self, case: Case, batch: Batch) -> int:
        return self._copy(batch) if case.stage in (_COPY, _ALL) else batch_bytes(batch)

    def _copy(self, batch: Batch) -> int:
        """Copy ``batch`` while the one before may still be copied; returns its bytes."""
        assert self._stream is not None
        sources = tensors_in(batch)
        if not self._targets or self._targets[0][0].shape != sources[0].shape:
            self._targets = [[torch.empty_like(t, device="cuda") for t in sources] for _ in (0, 1)]
            self._copied = [torch.cuda.Event(blocking=True) for _ in (0, 1)]
        self._targets.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()
        with self._stream:
            for source, target in zip(sources, self._targets[0], strict=True):
                target.copy_(source, non_blocking=True)
        self._copied[0].record(self._stream)
        return batch_bytes(batch)


def forget_files(folder: Path) -> None:
    """Have the system keep nothing of the files of ``folder`` in memory."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def work(
    config: Config,
    folders: dict[str, Path],
    rank: int,
    barrier: multiprocessing.synchronize.Barrier,
    results: "multiprocessing.Queue[Passed]",
) -> None:
    """The process ``rank``, which takes part in all cases of more processes."""
    passes = {place: Passes(config, folder, rank) for place, folder in folders.items()}
    for case in cases(config, has_gpu=torch.cuda.is_available()):
        takes_part, is_cold = rank < case.num_processes, case.place == "disk"
        if takes_part and not is_cold:
            passes[case.place].measure(case, only_one=True)
        if rank == 0 and is_cold:
            forget_files(folders[case.place])
        barrier.wait(_WAIT_SECONDS)
        if takes_part:
            results.put(passes[case.place].measure(case, only_one=is_cold))
        barrier.wait(_WAIT_SECONDS)


def summed(case: Case, config: Config, passed: list[Passed]) -> Row:
    """One row of all processes' passes."""
    rate = sum(p.num_bytes / p.seconds for p in passed)
    return {
        "bench": "input_stages",
        "system": "torchembed",
        "batch_per_gpu": config.batch_size,
        **case._asdict(),
        "bytes_per_second": rate,
        "cores": sum(p.cpu_seconds / p.seconds for p in passed),
        "needed_bytes_per_second": needed_bytes_per_second(config) * case.num_processes,
    }


def needed_bytes_per_second(config: Config) -> float:
    """The rate at which one rank takes batches."""
    # float32 dense features and labels, int32 ids.
    sample_bytes = 4 * (len(INT_NAMES) + 1 + sum(MLPERF_HOTNESS))
    return config.batch_size * sample_bytes / (config.step_ms / 1e3)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(config.num_processes)
    results: multiprocessing.Queue[Passed] = context.Queue()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=config.memory_folder) as in_memory,
        tempfile.TemporaryDirectory(dir=config.disk_folder) as on_disk,
    ):
        folders = {"memory": Path(in_memory), "disk": Path(on_disk)}
        made = random_rows(config.num_rows)
        for folder in folders.values():
            write_mlperf(made, folder)
        del made
        arguments = [(config, folders, rank, barrier, results) for rank in range(barrier.parties)]
        processes = [
            context.Process(target=work, args=of_rank, daemon=True) for of_rank in arguments
        ]
        for process in processes:
            process.start()
        print("files   stage                processes  threads of each   GB/s  needed  cores")
        for case in cases(config, has_gpu=torch.cuda.is_available()):
            passed = [results.get(timeout=_WAIT_SECONDS) for _ in range(case.num_processes)]
            row = summed(case, config, passed)
            rows.append(row)
            print(
                f"{case.place:7} {case.stage:20} {case.num_processes:9d} {case.num_threads:16d}"
                f" {row['bytes_per_second'] / 1e9:6.2f}"
                f" {row['needed_bytes_per_second'] / 1e9:7.2f} {row['cores']:6.2f}",
                flush=True,
            )
            if config.output is not None:
                write_results(config.output, rows)
        for process in processes:
            process.join(_WAIT_SECONDS)
            if process.exitcode != 0:
                raise RuntimeError(f"a process ended with {process.exitcode}; its error is above")


if __name__ == "__main__":
    main()
