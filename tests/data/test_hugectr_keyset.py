"""Keyset files of HugeCTR."""

import struct
from pathlib import Path

import pytest
import torch

from torchembed.data import read_hugectr_keyset


def test_keys_are_those_of_the_file_in_its_order(tmp_path: Path) -> None:
    wide, narrow = tmp_path / "wide.keyset", tmp_path / "narrow.keyset"
    wide.write_bytes(struct.pack("<4q", 7, -1, 2**63 - 1, -(2**63)))
    narrow.write_bytes(struct.pack("<3I", 2**32 - 1, 0, 2**31))
    keys = read_hugectr_keyset(wide, key_dtype=torch.int64)
    assert keys.dtype == torch.int64
    assert keys.tolist() == [7, -1, 2**63 - 1, -(2**63)]
    keys = read_hugectr_keyset(str(narrow), key_dtype=torch.uint32)
    assert keys.dtype == torch.int64
    assert keys.tolist() == [2**32 - 1, 0, 2**31]


def test_an_empty_file_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_hugectr_keyset(tmp_path / "empty", key_dtype=torch.int64).shape == (0,)


@pytest.mark.parametrize(
    ("num_bytes", "key_dtype", "message"),
    [
        (13, torch.int64, r"a multiple of 8 bytes, as torch.int64 .* got 13; it is cut off$"),
        (12, torch.int64, r"got 12; it is cut off, or of torch\.uint32 keys"),
        (6, torch.uint32, r"a multiple of 4 bytes, as torch.uint32 .* got 6; it is cut off$"),
    ],
)
def test_odd_sizes_are_named(
    tmp_path: Path, num_bytes: int, key_dtype: torch.dtype, message: str
) -> None:
    path = tmp_path / "odd.keyset"
    path.write_bytes(bytes(num_bytes))
    with pytest.raises(ValueError, match=rf"odd\.keyset must have .*{message}"):
        read_hugectr_keyset(path, key_dtype=key_dtype)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_hugectr_keyset(tmp_path / "nowhere", key_dtype=torch.int64)
    with pytest.raises(TypeError, match=r"key_dtype must be torch\.int64 or torch\.uint32"):
        read_hugectr_keyset(tmp_path, key_dtype=torch.int32)
