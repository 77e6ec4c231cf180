"""Tensors of safetensors files as rows by key."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import torchembed
from torchembed.checkpoints import RowSource, open_safetensors_rows
from torchembed.training import export_safetensors


def joined(source: RowSource) -> tuple[Tensor, Tensor]:
    chunks = list(source)
    return torch.cat([c.keys for c in chunks]), torch.cat([c.rows for c in chunks])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_row_numbers_are_the_keys(tmp_path: Path, dtype: torch.dtype, chunk_bytes: int) -> None:
    rows = torch.randn(13, 3).to(dtype)
    save_file({"other": torch.ones(2), "item.weight": rows}, tmp_path / "m.safetensors")
    source = open_safetensors_rows(
        tmp_path / "m.safetensors", "item.weight", chunk_bytes=chunk_bytes
    )
    assert (source.num_rows, source.embedding_dim) == (13, 3)
    most = max(chunk_bytes // (8 + 3 * dtype.itemsize), 1)
    assert [len(c.keys) for c in source] == [most] * (13 // most) + [13 % most] * (13 % most > 0)
    for _ in range(2):  # each iteration begins anew
        keys, found = joined(source)
        assert torch.equal(keys, torch.arange(13))
        assert found.dtype == dtype
        assert torch.equal(found, rows)


def test_a_tensor_has_the_keys(tmp_path: Path) -> None:
    ids, rows = torch.tensor([7, -1, 2**62]), torch.randn(3, 2)
    save_file({"rows": rows, "ids": ids}, tmp_path / "m.safetensors")
    source = open_safetensors_rows(tmp_path, "rows", keys="ids", chunk_bytes=40)
    keys, found = joined(source)
    assert torch.equal(keys, ids) and torch.equal(found, rows)
    for chunk in source:
        chunk.rows.zero_()
    assert torch.equal(joined(source)[1], rows)


def test_no_rows_are_one_chunk(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"rows": torch.empty(0, 4), "ids": torch.empty(0, dtype=torch.int64)}, file)
    for keys in (None, "ids"):
        source = open_safetensors_rows(file, "rows", keys=keys)
        assert [tuple(chunk.rows.shape) for chunk in source] == [(0, 4)]


def test_exports_in_several_files_are_read(tmp_path: Path) -> None:
    model = nn.ModuleDict({n: torchembed.EmbeddingBag(9, 4, mode="sum") for n in "ab"})
    export_safetensors(model, tmp_path / "exported", max_file_bytes=9 * 4 * 4)
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 1
    for name in "ab":
        _, found = joined(open_safetensors_rows(tmp_path / "exported", f"{name}.weight"))
        assert torch.equal(found, model.get_parameter(f"{name}.weight"))


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    tensors = {
        "rows": torch.ones(3, 2),
        "flat": torch.ones(3),
        "whole": torch.ones(3, 2, dtype=torch.int64),
        "few": torch.arange(2),
        "short": torch.arange(3, dtype=torch.int32),
        "twice": torch.tensor([5, 6, 5]),
    }
    save_file(tensors, file)
    for name, keys, message in (
        ("x", None, r"tensor must name a tensor of .*, \['few', .*, got 'x'"),
        ("rows", "x", r"keys must name a tensor of .*, \['few', .*, got 'x'"),
        ("flat", None, r"tensor 'flat' of .* must be rows \[R, D\] .*, got torch.float32 \[3\]"),
        ("whole", None, r"must be rows \[R, D\] .*, got torch.int64 \[3, 2\]"),
        ("rows", "few", r"'few' of .* each row, torch.int64 \[3\], got torch.int64 \[2\]"),
        ("rows", "short", r"each row, torch.int64 \[3\], got torch.int32 \[3\]"),
        ("rows", "twice", r"tensor 'twice' of .* must hold each key once, and holds 5 in"),
    ):
        with pytest.raises(ValueError, match=message):
            open_safetensors_rows(file, name, keys=keys)
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        open_safetensors_rows(file, "rows", chunk_bytes=0)
    with pytest.raises(FileNotFoundError):
        open_safetensors_rows(tmp_path / "absent.safetensors", "rows")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="it is cut off or corrupt"):
        open_safetensors_rows(file, "rows")
