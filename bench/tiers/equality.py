"""Whether tables train the same bits wherever their rows are.

``python -m bench.tiers.equality`` trains a small model of two tables through ``TrainPipeline``, by
each optimizer, once with all rows on the device, and then with a part of them in a cache there and
the others in host memory or on disk. Ids are Zipf's, or ``turnover``: no batch has a row of the one
before. It prints a line a case: whether all losses, rows, optimizer states and dense weights have
the same bits as on the device, and how many rows moved. Then it prints counts, and fails unless all
cases are equal. If no row ever had to leave a cache or host memory that has no room for all rows,
the case shows nothing, and counts as a failure, too.

``rows on device`` is the size of the cache. Of Zipf ids it is a share of each table's rows, where
0 % stands for the least with which they can be trained, the rows of the largest batch. Of turnover
ids it is a batch's rows and one to spare, just these rows, and one row too few for a last batch,
which must be refused by an error that names the table, and must change nothing. Tables on disk have
as few rows in host memory as they can: those of the cache and of the largest batch.
"""

import dataclasses
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from bench.tiers.equality_ids import (
    DIMS,
    FIXED_ROWS,
    NUM_ROWS,
    Ranker,
    most_rows,
    turnover_batch,
    zipf_batch,
)
from torchembed import Disk, HostMemory
from torchembed.data import Batch
from torchembed.optim import SGD, Adagrad, Adam, RowwiseAdagrad, split_parameters
from torchembed.tables import Storage, row_chunks
from torchembed.training import TrainPipeline

OPTIMIZERS = {kind.__name__: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam)}
SHARES = (0.0, 0.1, 0.25, 1.0)
"""Of a table's rows, in its cache; 0 for the fewest that do."""
_CHUNK_BYTES = 1 << 16
_LR = 0.05
HEADER = (
    "optimizer       ids       rows on device  others   losses   state  rows to device    to host"
    "  into host memory    to disk"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the comparison."""

    steps: int = 200
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    folder: Path | None = None
    """An existing folder for the rows of tables on disk; a temporary one where None."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.optimizers if name not in OPTIMIZERS]
        if unknown:
            raise ValueError(
                f"optimizers must be of {', '.join(OPTIMIZERS)}, got {', '.join(unknown)}"
            )
        if self.steps < 2:
            raise ValueError(
                f"steps must be at least 2, so that trained rows are used, got {self.steps}"
            )
        if self.folder is not None and not self.folder.is_dir():
            raise FileNotFoundError(f"folder must exist, got {self.folder}; make it")


class Case(NamedTuple):
    """Where the rows of both tables are, and what becomes of the last batch."""

    ids: str
    """``"zipf"`` or ``"turnover"``."""
    on_device: str
    """The size of the caches, in words."""
    cache_rows: Mapping[str, int]
    host_rows: Mapping[str, int] | None
    """Of tables on disk; None for tables in host memory."""
    refused: Batch | None
    """A last batch that is too large for a cache; None without."""


class Trained(NamedTuple):
    """What a run left."""

    losses: list[str]
    """Of each step, as hexadecimal numbers."""
    state: dict[str, Tensor]
    """Rows, optimizer states and dense weights, by name."""
    moved: dict[str, int]
    """Counts of all caches together, by the names of :class:`torchembed.CacheStatistics`; empty
    without any."""
    error: str | None
    """What was raised for the last batch."""


class Outcome(NamedTuple):
    """A case beside the same training on the device."""

    losses_equal: bool
    state_equal: bool
    problem: str | None
    """What else is wrong."""
    moved: dict[str, int]

    @property
    def is_equal(self) -> bool:
        """True if all is as it must be."""
        return self.losses_equal and self.state_equal and self.problem is None


def cases(ids: str, batches: Sequence[Batch]) -> Iterator[Case]:
    """All cases of one kind of ids, each in host memory and on disk."""
    sized = _zipf_caches(batches) if ids == "zipf" else _turnover_caches(batches)
    for on_disk, (words, cached, refused) in itertools.product((False, True), sized):
        needed = most_rows(batches if refused is None else [*batches, refused])
        host = {table: min(cached[table] + needed[table], NUM_ROWS) for table in cached}
        yield Case(ids, words, cached, host if on_disk else None, refused)


def _zipf_caches(batches: Sequence[Batch]) -> list[tuple[str, dict[str, int], Batch | None]]:
    """The size of the caches in words and in rows of each table; no batch is refused."""
    least = most_rows(batches)
    sizes = {share: dict.fromkeys(DIMS, int(share * NUM_ROWS)) for share in SHARES} | {0.0: least}
    return [(f"{share:.0%}", cached, None) for share, cached in sizes.items()]


def _turnover_caches(batches: Sequence[Batch]) -> list[tuple[str, dict[str, int], Batch | None]]:
    """The size of the caches in words and in rows of each table, and the batch that is refused."""
    exactly = most_rows(batches)
    larger = {table: rows + 1 for table, rows in exactly.items()}
    too_large = turnover_batch(len(batches), num_more=1)
    return [
        ("one to spare", larger, None),
        ("just enough", exactly, None),
        ("one too few", exactly, too_large),
    ]


def trained(
    storages: Mapping[str, Storage | None],
    optimizer: str,
    batches: Sequence[Batch],
    device: torch.device,
    refused: Batch | None = None,
) -> Trained:
    """Train on ``batches`` from the initial values, then on ``refused``."""
    model = Ranker(storages, device)
    tables, dense = split_parameters(model.parameters())
    optimizers = [OPTIMIZERS[optimizer](tables, lr=_LR), torch.optim.Adam(dense, lr=_LR)]
    last, error = [] if refused is None else [refused], None
    # On a CPU, too, the steps that a GPU captures: they fetch rows ahead.
    with TrainPipeline(
        model, F.binary_cross_entropy_with_logits, optimizers, device=device, capture=True
    ) as pipeline:
        stream = iter([*batches, *last])
        losses = [float(pipeline.progress(stream).loss).hex() for _ in batches]
        try:
            for _ in last:
                pipeline.progress(stream)
        except RuntimeError as raised:
            error = str(raised)
    statistics = model.tables.cache_statistics(wait=True).values()
    names = ("rows_read_ahead", "rows_read_in_step", "write_backs")
    moved = {
        name: sum(getattr(cache, name) for cache in statistics)
        for name in (*names, "disk_rows_read", "disk_rows_written")
    }
    return Trained(losses, _state(model), moved, error)


def _state(model: Ranker) -> dict[str, Tensor]:
    found = {f"dense.{name}": tensor for name, tensor in model.dense.state_dict().items()}
    for table in model.tables.table_set.tables:
        for number, chunk in enumerate(row_chunks(table, _CHUNK_BYTES)):
            parts = {"keys": chunk.keys, "rows": chunk.rows, **chunk.states}
            name = f"{table.spec.name}.{number}"
            found |= {f"{name}.{part}": tensor.clone() for part, tensor in parts.items()}
    return found


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both have the same tensors by the same names; zeros of either sign differ, and NaNs
    of the same bits are equal."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype
        and tensor.shape == other[name].shape
        and _bytes(tensor) == _bytes(other[name])
        for name, tensor in one.items()
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def outcome(case: Case, found: Trained, expected: Trained) -> Outcome:
    """What a case's run left beside what the run on the device left."""
    problem = None
    if case.refused is not None:
        table, rows = next(iter(case.cache_rows.items()))
        wanted = rf"tables {table} share a cache of {rows} rows on the device, .* uses 1 more"
        if found.error is None or re.search(wanted, found.error) is None:
            problem = f"the last batch must raise {wanted!r}, got {found.error!r}"
    elif min(case.cache_rows.values()) < NUM_ROWS and not found.moved["write_backs"]:
        problem = "no row left a cache; raise --steps"
    elif (
        case.host_rows is not None
        and min(case.host_rows.values()) < NUM_ROWS
        and not found.moved["disk_rows_written"]
    ):
        problem = "no row reached the disk; raise --steps"
    return Outcome(
        found.losses == expected.losses,
        same_bits(found.state, expected.state),
        problem,
        found.moved,
    )


def line_text(optimizer: str, case: Case, result: Outcome) -> str:
    """One line below ``HEADER``."""
    words = {True: "equal", False: "differ"}
    to_device = result.moved["rows_read_ahead"] + result.moved["rows_read_in_step"]
    line = (
        f"{optimizer:15} {case.ids:9} {case.on_device:>14}"
        f"  {'in host' if case.host_rows is None else 'on disk'}"
        f" {words[result.losses_equal]:>8} {words[result.state_equal]:>7}"
        f" {to_device:15,} {result.moved['write_backs']:10,}"
    )
    if case.host_rows is not None:
        line += f" {result.moved['disk_rows_read']:17,} {result.moved['disk_rows_written']:10,}"
    return line if result.problem is None else f"{line}  wrong: {result.problem}"


def compare(config: Config, folder: Path, device: torch.device) -> list[Outcome]:
    """Train and print all cases, with tables on disk in ``folder``."""
    print(f"{NUM_ROWS} rows of {' and '.join(map(str, DIMS.values()))} columns in two tables, "
          f"{config.steps} steps; turnover ids are {FIXED_ROWS} of each in a batch")  # fmt: skip
    print(HEADER)
    makers = {"zipf": zipf_batch, "turnover": turnover_batch}
    batches = {ids: [make(n) for n in range(config.steps)] for ids, make in makers.items()}
    outcomes = []
    for optimizer, (ids, given) in itertools.product(config.optimizers, batches.items()):
        expected = trained(dict.fromkeys(DIMS), optimizer, given, device)
        for case in cases(ids, given):
            with tempfile.TemporaryDirectory(dir=folder) as rows:
                found = trained(
                    storages_of(case, Path(rows)), optimizer, given, device, case.refused
                )
            outcomes.append(outcome(case, found, expected))
            print(line_text(optimizer, case, outcomes[-1]), flush=True)
    return outcomes


def storages_of(case: Case, folder: Path) -> dict[str, Storage | None]:
    """The storage of each table, in ``folder`` if it is on disk."""
    if case.host_rows is None:
        return {name: HostMemory(cache_rows=rows) for name, rows in case.cache_rows.items()}
    return {
        name: Disk(path=folder / name, host_rows=case.host_rows[name], cache_rows=rows)
        for name, rows in case.cache_rows.items()
    }


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = config.folder or Path(tempfile.gettempdir())
    outcomes = compare(config, folder, device)
    num_equal = sum(one.is_equal for one in outcomes)
    print(f"{len(outcomes)} cases: {num_equal} train the same bits as on the device, "
          f"{len(outcomes) - num_equal} do not")  # fmt: skip
    if num_equal < len(outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
