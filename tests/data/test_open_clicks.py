"""One call finds the reader for what is there."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import reading
from torchembed.data import CriteoText, MlperfDays, Split, open_clicks


def test_text_is_found(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="Criteo's text is read with polars")
    path = tmp_path / "train.txt"
    path.write_text(reading.as_text(reading.random_rows(20)))
    for place in (tmp_path, str(path)):
        source = open_clicks(
            place, batch_size=3, table_sizes=9, split=Split.TEST, held_out=0.5, rank=1, world_size=2
        )
        assert isinstance(source, CriteoText)
        assert source.table_sizes == (9,) * 26
        assert [batch.sparse.batch_size for batch in source] == [2]


def test_parquet_is_found(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet files are read with pyarrow")
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet files are read with pyarrow")
    names = ["label", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))]
    pq.write_table(pa.table({name: [0, 1, 1] for name in names}), tmp_path / "log.parquet")
    (tmp_path / "notes.txt").write_text("not rows")
    for place in (tmp_path, tmp_path / "log.parquet"):
        source = open_clicks(place, batch_size=2, table_sizes=9)
        assert [batch.sparse.batch_size for batch in source] == [2, 1]


def test_mlperf_files_are_found_and_know_their_tables(tmp_path: Path) -> None:
    np.save(tmp_path / "day_0_dense.npy", np.zeros((3, 13), np.float32))
    np.save(tmp_path / "day_0_labels.npy", np.zeros((3, 1), np.int32))
    ids = dict.fromkeys(map(str, range(26)), np.full((3, 2), 5, np.int32))
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **ids)
    source = open_clicks(tmp_path, batch_size=2, table_sizes=4)
    assert isinstance(source, MlperfDays)
    assert source.table_sizes == (4,) * 26
    assert next(iter(source)).sparse.values.tolist() == [1] * 2 * 2 * 26
    (tmp_path / "tables.json").write_text(json.dumps({"table_sizes": [6] * 26}))
    assert open_clicks(tmp_path, batch_size=2, table_sizes=4).table_sizes == (6,) * 26


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere"):
        open_clicks(tmp_path / "nowhere", batch_size=2, table_sizes=4)
    with pytest.raises(FileNotFoundError, match=r"must hold train.txt, .* it has no files"):
        open_clicks(tmp_path, batch_size=2, table_sizes=4)
