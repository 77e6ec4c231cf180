"""Rows by key in safetensors folders: what is written comes back, and damage is named."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.support.ranks import run_on_ranks
from tests.support.row_chunks import SPECIAL_KEYS, Row, made_chunk, rows_by_key
from torchembed.checkpoints import export_rows, open_rows
from torchembed.checkpoints.files.checked_json import from_checked_json, to_checked_json
from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.rows import distinct_keys
from torchembed.checkpoints.rows.row_folder import INDEX
from torchembed.core import ranks
from torchembed.tables import RowChunk

ROW_BYTES = 8 + 3 * 4 + 3 * 4 + 4 + 8 + 8
KEYS = [*SPECIAL_KEYS, *range(100, 120)]


def written(folder: Path, max_file_bytes: int = 7 * ROW_BYTES) -> Path:
    export_rows([made_chunk(KEYS[:9]), made_chunk(KEYS[9:])], folder, max_file_bytes=max_file_bytes)
    return folder


def change_index(folder: Path, change: Callable[[dict], None]) -> None:
    """Write the index anew with a checksum that holds, as a faulty program might."""
    fields = from_checked_json((folder / INDEX).read_bytes())
    change(fields)
    (folder / INDEX).write_bytes(to_checked_json(fields))


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=40),
    chunk_rows=st.integers(1, 50),
    file_rows=st.integers(1, 50),
    read_rows=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[int],
    chunk_rows: int,
    file_rows: int,
    read_rows: int,
    dtype: torch.dtype,
) -> None:
    row_bytes = ROW_BYTES - 3 * 4 + 3 * dtype.itemsize
    parts = [keys[i : i + chunk_rows] for i in range(0, len(keys), chunk_rows)] or [[]]
    chunks = [made_chunk(part, dtype=dtype) for part in parts]
    folder = tmp_path_factory.mktemp("rows")
    export_rows(chunks, folder, max_file_bytes=file_rows * row_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == max(-(-len(keys) // file_rows), 1)
    source = open_rows(folder, chunk_bytes=read_rows * row_bytes)
    assert (source.num_rows, source.embedding_dim) == (len(keys), 3)
    assert rows_by_key(source) == rows_by_key(chunks) == rows_by_key(source)
    for chunk in source:
        assert chunk.rows.dtype == dtype
        assert len(chunk.keys) <= read_rows


def test_columns_may_be_left_out_and_memory_used_again(tmp_path: Path) -> None:
    memory = RowChunk(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4), states={})

    def chunks() -> Iterator[RowChunk]:
        for number in range(3):
            memory.keys.copy_(torch.tensor([2 * number, 2 * number + 1]))
            memory.rows.fill_(number)
            yield memory

    export_rows(chunks(), tmp_path / "rows")
    expected = {key: Row([key // 2] * 4, {}, None, None) for key in range(6)}
    assert rows_by_key(open_rows(tmp_path / "rows")) == expected


def test_other_libraries_read_the_files(tmp_path: Path) -> None:
    written(tmp_path)
    tensors = load_file(tmp_path / "rows-00000-00000.safetensors")
    chunk = made_chunk(KEYS[:7])
    assert torch.equal(tensors["keys"], chunk.keys)
    assert torch.equal(tensors["rows"], chunk.rows)
    assert torch.equal(tensors["states.sum"], chunk.states["sum"])
    assert set(tensors) == {"keys", "rows", "scores", "touched", "states.exp_avg", "states.sum"}
    index = json.loads((tmp_path / INDEX).read_text())
    assert {name: file[0] for name, file in index["files"].items()} == {
        f"rows-00000-0000{number}.safetensors": rows for number, rows in enumerate((7, 7, 7, 4))
    }


def test_files_that_are_cut_off_changed_or_missing_are_named(tmp_path: Path) -> None:
    for number, damage in enumerate(("cut off", "lacks its file", "CRC-32")):
        folder = written(tmp_path / str(number))
        file = folder / "rows-00000-00002.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        if damage == "lacks its file":
            file.unlink()
        else:
            file.write_bytes(content[:-3] if damage == "cut off" else content)
        with pytest.raises((FileNotFoundError, ValueError), match=f"00002.safetensors|{damage}"):
            open_rows(folder)


def test_files_of_other_dtypes_widths_and_lengths_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    file = folder / "rows-00000-00001.safetensors"
    good = load_file(file)
    for change, message in (
        ({"keys": good["keys"].int()}, r"must hold keys as torch.int64 \[7\], got torch.int32"),
        ({"rows": good["rows"].half()}, "must hold rows as torch.float32"),
        ({"rows": good["rows"][:, :2].contiguous()}, r"\[7, 3\], got torch.float32 \[7, 2\]"),
        ({"scores": good["scores"][:6].clone()}, r"scores as torch.int64 \[7\], got .* \[6\]"),
        ({"more": good["scores"].clone()}, "must hold tensors"),
    ):
        save_file(good | change, file)
        with pytest.raises(ValueError, match=message):
            open_rows(folder)
    save_file({name: tensor[:5].clone() for name, tensor in good.items()}, file)
    with pytest.raises(ValueError, match="must hold 7 rows, got 5"):
        open_rows(folder)


@pytest.mark.parametrize("max_bytes", [1 << 30, 200])
def test_a_key_in_two_files_is_named(
    tmp_path: Path, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distinct_keys, "MAX_BYTES", max_bytes)
    assert open_rows(written(tmp_path / "good")).num_rows == len(KEYS)
    export_rows([made_chunk([*KEYS, -1])], tmp_path / "bad", max_file_bytes=9 * ROW_BYTES)
    with pytest.raises(ValueError, match=r"holds -1 in .*00000.safetensors and in .*00002.safe"):
        open_rows(tmp_path / "bad")


def test_an_export_that_ended_early_is_no_folder_of_rows(tmp_path: Path) -> None:
    folder = tmp_path / "rows"

    def failing() -> Iterator[RowChunk]:
        yield made_chunk(KEYS)
        raise RuntimeError("no more")

    with pytest.raises(FileNotFoundError, match="has none"):
        open_rows(folder)
    with pytest.raises(RuntimeError, match="no more"):
        export_rows(failing(), folder, max_file_bytes=ROW_BYTES)
    assert len(list(folder.iterdir())) > 2
    with pytest.raises(FileNotFoundError, match="did not come to its end"):
        open_rows(folder)
    export_rows([made_chunk([7])], folder)  # what was left is removed
    assert sorted(path.name for path in folder.iterdir()) == [
        "rows-00000-00000.safetensors",
        INDEX,
    ]
    assert list(rows_by_key(open_rows(folder))) == [7]


def test_wherever_an_export_stops_it_leaves_nothing_to_open_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rows"
    remaining = 0

    def stops(name: str) -> None:
        action = getattr(Storage, name)

        def counted(*arguments: object) -> object:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise OSError("stopped")
            return action(*arguments)

        monkeypatch.setattr(Storage, name, counted)

    for name in ("create_stream", "mkdir", "rename", "remove"):
        stops(name)
    for num_actions in range(20):
        remaining = num_actions
        try:
            export_rows([made_chunk(KEYS)], folder, max_file_bytes=9 * ROW_BYTES)
        except OSError:
            remaining = 1000
            with pytest.raises(FileNotFoundError, match="has none"):
                open_rows(folder)
        else:
            break
    remaining = 1000
    # The folder, the token, three files, the index and its renaming; before that, what the last
    # attempt left is removed: the token or the index, and three files.
    assert num_actions == 7 + 4
    assert rows_by_key(open_rows(folder)) == rows_by_key([made_chunk(KEYS)])


def test_rows_travel_through_other_storage_than_disks() -> None:
    url = "memory://row-folder"
    export_rows([made_chunk(KEYS)], url, max_file_bytes=9 * ROW_BYTES)
    assert rows_by_key(open_rows(url, chunk_bytes=100)) == rows_by_key([made_chunk(KEYS)])


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    export_rows([made_chunk(range(5))], folder)
    for file in folder.iterdir():
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), 13):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=file.name):
                open_rows(folder)
        file.write_bytes(whole)
    assert rows_by_key(open_rows(folder)) == rows_by_key([made_chunk(range(5))])


def test_a_folder_in_use_is_left_as_it_is(tmp_path: Path) -> None:
    folder = written(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match=INDEX):
        export_rows([made_chunk([1])], folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_every_cut_of_the_index_is_found(tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = (folder / INDEX).read_bytes()
    for size in range(0, len(whole), 7):
        (folder / INDEX).write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is corrupt: export again"):
            open_rows(folder)
    (folder / INDEX).write_bytes(whole)
    change_index(folder, lambda fields: fields.pop("columns"))
    with pytest.raises(ValueError, match="is corrupt: export again"):
        open_rows(folder)


def test_chunks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = made_chunk([1, 2])
    assert good.scores is not None
    for number, (chunks, message) in enumerate(
        (
            ([], "must be at least one"),
            ([good._replace(keys=good.keys.int())], "keys of a chunk must be int64"),
            ([good._replace(scores=good.scores[:1])], "scores of a chunk must be int64"),
            ([good._replace(rows=good.rows[:1])], "rows of a chunk must have a row for each of 2"),
            ([good._replace(rows=good.rows[:, 0])], "rows of a chunk must have a row for each"),
            ([good._replace(states={"sum": good.rows[:1]})], "states.sum of a chunk must have"),
            ([good._replace(rows=good.rows.to(torch.complex64))], "dtype that safetensors"),
            ([good, good._replace(scores=None)], "chunks must all have columns"),
            ([good, made_chunk([3], dim=2)], "chunks must all have columns"),
        )
    ):
        with pytest.raises(ValueError, match=message):
            export_rows(chunks, tmp_path / str(number))
    with pytest.raises(ValueError, match="max_file_bytes must be positive, got 0"):
        export_rows([good], tmp_path / "rows", max_file_bytes=0)
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        open_rows(written(tmp_path / "rows"), chunk_bytes=0)


def exports_on_ranks(folder: Path) -> list[str]:
    rank = ranks.rank()
    export_rows([made_chunk(KEYS[rank::2])], folder / "both", max_file_bytes=5 * ROW_BYTES)
    export_rows([made_chunk(KEYS)] if rank == 1 else [], folder / "second")
    errors = []
    for name, chunks in (
        ("forms", [made_chunk([rank], dim=2 + rank)]),
        ("failing", [made_chunk([rank])._replace(rows=torch.zeros(1 + rank, 3))]),
    ):
        try:
            export_rows(chunks, folder / name)
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_every_rank_writes_its_rows(tmp_path: Path) -> None:
    of_first, of_second = run_on_ranks(2, exports_on_ranks, tmp_path)
    expected = rows_by_key([made_chunk(KEYS)])
    assert rows_by_key(open_rows(tmp_path / "both")) == expected
    assert rows_by_key(open_rows(tmp_path / "second")) == expected
    assert [path.name for path in sorted((tmp_path / "both").glob("rows-00001-*"))] == [
        f"rows-00001-0000{number}.safetensors" for number in range(3)
    ]
    assert of_first[0].startswith("ValueError: chunks must have the same columns on all ranks")
    assert of_second[0].startswith("RuntimeError: rank 0 could not export rows to ")
    assert of_first[1].startswith("RuntimeError: rank 1 could not export rows to ")
    assert of_second[1].startswith("ValueError: rows of a chunk must have a row for each of 1")
    for name in ("forms", "failing"):
        with pytest.raises(FileNotFoundError, match="did not come to its end"):
            open_rows(tmp_path / name)
