"""Dumps of the Sparse Operation Kit, written here byte by byte as ``sok.dump`` writes them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.row_chunks import SPECIAL_KEYS, Row, rows_by_key
from torchembed.checkpoints import open_sok_rows

DIM = 2
DTYPES = ("i4", "i8", "u4", "u8", "f2", "f4", "f8")
KEYS, ROWS, STATE = range(3)


def write_file(
    path: Path, kind: int, values: np.ndarray, slot: str = "", number: int | None = None
) -> None:
    """
    Args:
        number: of the dtype in the head; None: that of ``values``.
    """
    if number is None:
        number = DTYPES.index(values.dtype.str[1:])
    head = (
        b" " * 256 + kind.to_bytes(4, "big") + slot.rjust(32).encode() + number.to_bytes(4, "big")
    )
    assert len(head) == 296
    path.write_bytes(head + values.tobytes())


def values_of(keys: Sequence[int], first: float, dtype: str) -> np.ndarray:
    rows = [[first + place + column / 4 for column in range(DIM)] for place in range(len(keys))]
    return np.array(rows, dtype).reshape(len(keys), DIM)


def dump(
    folder: Path,
    keys: Sequence[int],
    *,
    table: str = "emb_user_0",
    key_dtype: str = "<i8",
    dtype: str = "<f4",
    slots: Sequence[str] = (),
) -> Path:
    """
    Args:
        slots: as in the names of their files: ``Adam-m``.
    """
    folder.mkdir()
    write_file(folder / f"{table}-key", KEYS, np.array(keys, key_dtype))
    write_file(folder / f"{table}-weight", ROWS, values_of(keys, 0, dtype))
    for number, name in enumerate(slots, start=1):
        slot = name.partition("-")[2]
        write_file(folder / f"{table}-{name}", STATE, values_of(keys, 100 * number, dtype), slot)
    return folder


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize(
    ("key_dtype", "keys", "read"),
    [
        ("<i8", SPECIAL_KEYS, SPECIAL_KEYS),
        ("<u8", (0, 2**64 - 1, 2**63), (0, -1, -(2**63))),
        ("<i4", (0, -1, 2**31 - 1), (0, -1, 2**31 - 1)),
        ("<u4", (0, 2**32 - 1), (0, 2**32 - 1)),
        ("<i8", (), ()),
    ],
)
def test_keys_of_every_type(
    tmp_path: Path, key_dtype: str, keys: Sequence[int], read: Sequence[int], dtype: str
) -> None:
    folder = dump(tmp_path / "dump", keys, key_dtype=key_dtype, dtype=dtype)
    source = open_sok_rows(folder, "emb/user:0", embedding_dim=DIM, chunk_bytes=20)
    assert (source.num_rows, source.embedding_dim) == (len(keys), DIM)
    rows = values_of(keys, 0, dtype).tolist()
    expected = {key: Row(row, {}, None, None) for key, row in zip(read, rows, strict=True)}
    assert rows_by_key(source) == rows_by_key(source) == expected


@pytest.mark.parametrize(
    ("optimizer", "slots", "names"),
    [
        ("Adam", ("Adam-m", "Adam-v"), ("exp_avg", "exp_avg_sq")),
        ("Adagrad", ("Adagrad-accumulator",), ("sum",)),
        ("SGD", (), ()),
    ],
)
def test_states_come_by_their_names_here(
    tmp_path: Path, optimizer: str, slots: Sequence[str], names: Sequence[str]
) -> None:
    folder = dump(tmp_path / "dump", [3, 0, -5], slots=slots)
    source = open_sok_rows(folder, "emb_user_0", embedding_dim=DIM, optimizer=optimizer)
    for place, row in enumerate(rows_by_key(source).values()):
        assert row.states == {
            name: values_of([0] * 3, 100 * number, "<f4")[place].tolist()
            for number, name in enumerate(names, start=1)
        }
    without = open_sok_rows(folder, "emb_user_0", embedding_dim=DIM)
    assert all(row.states == {} for row in rows_by_key(without).values())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", [1, 2, 3], slots=["Adagrad-accumulator"])
    names = {item: folder / f"emb_user_0-{item}" for item in ("key", "weight")}
    state = folder / "emb_user_0-Adagrad-accumulator"

    def refused(message: str, **changes: object) -> None:
        arguments = {"table": "emb_user_0", "embedding_dim": DIM, "optimizer": "Adagrad"}
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            open_sok_rows(folder, **(arguments | changes))

    refused("embedding_dim must be at least 1, got 0", embedding_dim=0)
    refused("optimizer must be among .* got 'Ftrl'", optimizer="Ftrl")
    refused("must hold the file emb_user_0-Adam-m, and has none", optimizer="Adam")
    refused("must hold the file other-key, and has none", table="other")
    refused("must hold rows for 3 keys, as many as .* got 6", embedding_dim=1)
    refused("weight must have a multiple of 16 bytes behind the first 296", embedding_dim=4)

    whole = {path: path.read_bytes() for path in (*names.values(), state)}

    def refused_with(path: Path, content: bytes, message: str) -> None:
        path.write_bytes(content)
        refused(message)
        path.write_bytes(whole[path])

    key, weight = names["key"], names["weight"]
    refused_with(key, whole[key][:-1], "key must have a multiple of 8 bytes behind")
    refused_with(weight, whole[weight][:-8], "must hold rows for 3 keys, as many as .* got 2")
    refused_with(state, whole[state][:-8], "must hold sum for 3 keys, as many as .* got 2")
    refused_with(key, whole[key][:100], "begin with a head of 296 bytes, got 100")
    refused_with(key, whole[weight], "must say that it holds KEYS .* got kind 1")
    refused_with(state, whole[weight], "holds STATE .*slot 'accumulator'.* got kind 1 and slot ''")
    write_file(key, KEYS, values_of([1, 2, 3], 0, "<f4"))
    refused("must hold KEYS of one of .* got torch.float32")
    write_file(key, KEYS, np.array([1, 2, 3]), number=7)
    refused("got an unknown dtype .number 7.")
    write_file(key, KEYS, np.array([1, 2, 1]))
    refused(r"must hold each key once, and holds 1 in .*-key and in .*-key")
    key.write_bytes(whole[key])
    write_file(state, STATE, values_of([1, 2, 3], 0, "<f8"), "accumulator")
    refused("accumulator must hold torch.float32 as .*-weight does, got torch.float64")
