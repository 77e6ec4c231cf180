"""Sparse models of HugeCTR, written here as its documentation describes them."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.row_chunks import SPECIAL_KEYS, Row, rows_by_key
from torchembed.checkpoints import export_rows, open_hugectr_rows, open_rows

DIM = 3


def sparse_model(folder: Path, keys: Sequence[int], key_dtype: str = "<i8") -> Path:
    folder.mkdir()
    folder.joinpath("key").write_bytes(np.array(keys, key_dtype).tobytes())
    folder.joinpath("emb_vector").write_bytes(vectors(keys).astype("<f4").tobytes())
    return folder


def vectors(keys: Sequence[int]) -> np.ndarray:
    return np.array([[key % 7 + column / 2 for column in range(DIM)] for key in keys]).reshape(
        len(keys), DIM
    )


def expected(keys: Sequence[int]) -> dict[int, Row]:
    return {
        key: Row(row.tolist(), {}, None, None) for key, row in zip(keys, vectors(keys), strict=True)
    }


@pytest.mark.parametrize("keys", [(), SPECIAL_KEYS, range(1000, 1100)])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_every_vector_comes_with_its_key(
    tmp_path: Path, keys: Sequence[int], chunk_bytes: int
) -> None:
    source = open_hugectr_rows(
        sparse_model(tmp_path / "model", keys), embedding_dim=DIM, chunk_bytes=chunk_bytes
    )
    assert (source.num_rows, source.embedding_dim) == (len(keys), DIM)
    assert rows_by_key(source) == rows_by_key(source) == expected(keys)
    num_rows = max(chunk_bytes // (8 + 4 * DIM), 1)
    assert all(len(chunk.keys) <= num_rows for chunk in source)


def test_memory_is_that_of_keys_and_chunks(tmp_path: Path) -> None:
    num_rows, dim, chunk_bytes = 20_000, 256, 1 << 18
    np.arange(num_rows).tofile(tmp_path / "key")
    np.zeros((num_rows, dim), np.float32).tofile(tmp_path / "emb_vector")
    tracemalloc.start()  # what is read from files is Python's memory
    try:
        source = open_hugectr_rows(tmp_path, embedding_dim=dim, chunk_bytes=chunk_bytes)
        assert sum(len(chunk.keys) for chunk in source) == num_rows
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Keys are compared before the first chunk; then the chunk before is still there while the next
    # one is read. Streams and objects are left 256 KiB; the files have 20 MB.
    assert peak < 8 * num_rows + 2 * chunk_bytes + (1 << 18)


def test_a_table_may_lie_in_several_folders(tmp_path: Path) -> None:
    parts = [(5, -1), (), (0, 2**63 - 1)]
    folders = [sparse_model(tmp_path / str(n), keys) for n, keys in enumerate(parts)]
    source = open_hugectr_rows(folders, embedding_dim=DIM)
    assert rows_by_key(source) == expected([5, -1, 0, 2**63 - 1])
    export_rows(source, tmp_path / "rows")
    assert rows_by_key(open_rows(tmp_path / "rows")) == rows_by_key(source)


def test_slots_of_localized_embeddings_are_compared(tmp_path: Path) -> None:
    folder = sparse_model(tmp_path / "model", [4, 9])
    folder.joinpath("slot_id").write_bytes(np.array([0, 1], "<u8").tobytes())
    assert rows_by_key(open_hugectr_rows(folder, embedding_dim=DIM)) == expected([4, 9])
    folder.joinpath("slot_id").write_bytes(np.array([0, 1, 2], "<u8").tobytes())
    with pytest.raises(ValueError, match=r"slot_id must have 2 numbers, .* got 3"):
        open_hugectr_rows(folder, embedding_dim=DIM)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    good = sparse_model(tmp_path / "good", [1, 2, 3])
    with pytest.raises(ValueError, match=r"emb_vector must have a multiple of 16 bytes"):
        open_hugectr_rows(good, embedding_dim=4)
    with pytest.raises(ValueError, match=r"must hold rows for 3 keys, as many as .* got 9"):
        open_hugectr_rows(good, embedding_dim=1)
    with pytest.raises(ValueError, match="embedding_dim must be at least 1, got 0"):
        open_hugectr_rows(good, embedding_dim=0)
    with pytest.raises(ValueError, match="paths must be at least one folder"):
        open_hugectr_rows([], embedding_dim=DIM)
    narrow = sparse_model(tmp_path / "narrow", [1, 2, 3], "<i4")
    with pytest.raises(ValueError, match="key of 64 bits for each of 3 rows, and has 32"):
        open_hugectr_rows(narrow, embedding_dim=DIM)
    cut = sparse_model(tmp_path / "cut", [1, 2, 3])
    cut.joinpath("key").write_bytes(cut.joinpath("key").read_bytes()[:-1])
    with pytest.raises(ValueError, match="key must have a multiple of 8 bytes"):
        open_hugectr_rows(cut, embedding_dim=DIM)
    with pytest.raises(ValueError, match=r"holds 2 in .*good/key and in .*again/key"):
        open_hugectr_rows([good, sparse_model(tmp_path / "again", [8, 2])], embedding_dim=DIM)
    for name in ("key", "emb_vector"):
        folder = sparse_model(tmp_path / f"without {name}", [1])
        folder.joinpath(name).unlink()
        with pytest.raises(FileNotFoundError, match=f"and lacks {name}"):
            open_hugectr_rows(folder, embedding_dim=DIM)
    with pytest.raises(FileNotFoundError, match="and lacks key"):
        open_hugectr_rows(tmp_path / "nowhere", embedding_dim=DIM)


def test_files_that_shrink_while_they_are_read_are_named(tmp_path: Path) -> None:
    folder = sparse_model(tmp_path / "model", range(5000))
    chunks = iter(open_hugectr_rows(folder, embedding_dim=DIM, chunk_bytes=40))
    next(chunks)
    folder.joinpath("emb_vector").write_bytes(b"")
    with pytest.raises(ValueError, match="emb_vector was cut off while its rows were read"):
        list(chunks)
