"""Reading goes on after any part of an epoch, on any ranks, and no row is lost or read twice."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reading
from torchembed.data import (
    BackgroundLoader,
    BatchSource,
    ClickLog,
    ClickLogConfig,
    CriteoText,
    MlperfDays,
    ParquetClicks,
    Portion,
)

FILE_ROWS = (23, 9, 31)
NUM_ROWS = sum(FILE_ROWS)
MakeSource = Callable[..., BatchSource]


def text(folder: Path) -> MakeSource:
    """Rows are told apart by their first count."""
    pytest.importorskip("polars", reason="Criteo's text is read with polars")
    for day, first in enumerate(np.cumsum((0, *FILE_ROWS[:-1])).tolist()):
        rows = reading.random_rows(FILE_ROWS[day], seed=day)
        for row, counts in enumerate(rows.counts):
            counts[0] = first + row
        (folder / f"day_{day}").write_text(reading.as_text(rows))
    return lambda **share: CriteoText(folder, table_sizes=50, **share)


def mlperf(folder: Path) -> MakeSource:
    for day, first in enumerate(np.cumsum((0, *FILE_ROWS[:-1])).tolist()):
        numbers = np.arange(first, first + FILE_ROWS[day], dtype=np.float32)[:, None]
        np.save(folder / f"day_{day}_dense.npy", np.log1p(np.repeat(numbers, 13, axis=1)))
        np.save(folder / f"day_{day}_labels.npy", (numbers[:, 0] % 2).astype(np.int32))
        ids = dict.fromkeys(map(str, range(26)), numbers.astype(np.int32))
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **ids)
    return lambda **share: MlperfDays(folder, table_sizes=NUM_ROWS, **share)


def parquet(folder: Path) -> MakeSource:
    pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files are read with pyarrow")
    for day, first in enumerate(np.cumsum((0, *FILE_ROWS[:-1])).tolist()):
        numbers = list(range(first, first + FILE_ROWS[day]))
        table = {"label": [n % 2 for n in numbers], "n": numbers, "id": numbers}
        pq.write_table(pa.table(table), folder / f"{day}.parquet", row_group_size=7)
    names = {"dense": ("n",), "categorical": ("id",)}
    return lambda **share: ParquetClicks(folder, table_sizes=NUM_ROWS, **names, **share)


def click_log(folder: Path) -> MakeSource:
    config = ClickLogConfig(table_sizes=(5,), hotness=(1,), num_dense=2, num_train=NUM_ROWS)
    return lambda **share: ClickLog(config, **share)


@pytest.fixture(scope="module", params=[text, mlperf, parquet, click_log])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeSource:
    return request.param(tmp_path_factory.mktemp("rows"))


def rows_of(make: MakeSource, after: Sequence[Portion], portion: Portion) -> list[list[list]]:
    """The first batches of each rank, as many as ``portion`` has, each a list of its rows."""
    of_ranks = []
    for rank in range(portion.world_size):
        share = {"rank": rank, "world_size": portion.world_size, "batch_size": portion.batch_size}
        batches = make(**share).begin(after)
        of_ranks.append(
            [
                [tuple(row) for row in batch.dense[:, :2].tolist()]
                for _, batch in zip(range(portion.num_batches), batches, strict=False)
            ]
        )
    return of_ranks


portions = st.builds(Portion, st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))


@settings(max_examples=15)
@given(parts=st.lists(portions, max_size=3), last=portions)
def test_every_row_is_read_once(make: MakeSource, parts: list[Portion], last: Portion) -> None:
    seen = [
        row
        for index, portion in enumerate((*parts, last._replace(num_batches=NUM_ROWS)))
        for batches in rows_of(make, parts[:index], portion)
        for batch in batches
        for row in batch
    ]
    whole = rows_of(make, (), Portion(1, NUM_ROWS, 1))[0][0]
    assert len(set(whole)) == NUM_ROWS
    assert sorted(seen) == sorted(whole)


@settings(max_examples=10)
@given(portion=portions, parts=st.lists(portions, max_size=1))
def test_the_same_ranks_go_on_with_the_same_batches(
    make: MakeSource, portion: Portion, parts: list[Portion]
) -> None:
    all_of_it = portion._replace(num_batches=NUM_ROWS)
    whole = rows_of(make, parts, all_of_it)
    rest = rows_of(make, [*parts, portion], all_of_it)
    assert rest == [batches[portion.num_batches :] for batches in whole]


def test_a_loader_goes_on_too(make: MakeSource) -> None:
    loader = BackgroundLoader(make(batch_size=5))
    whole = reading.samples(loader)
    rest = reading.samples(loader.begin([Portion(1, 5, 4)]))
    assert_same = rest.labels.tolist(), rest.dense.tolist(), rest.ids
    assert assert_same == (
        whole.labels[20:].tolist(),
        whole.dense[20:].tolist(),
        [column[20:] for column in whole.ids],
    )
