"""Files of the safetensors format, written and read in chunks.

The ``safetensors`` package wants whole tensors in memory. The format, as
https://huggingface.co/docs/safetensors says it: the length of the header, 8 bytes, little-endian;
the header, JSON that gives each tensor's dtype, shape and range of bytes; the bytes of all tensors,
row-major, one after the other.
"""

import json
import math
import mmap
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from torchembed.checkpoints.files.storage import CHUNK_BYTES, Storage

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX = "model.safetensors.index.json"
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def header_of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    """Bytes of a file before the data of ``tensors``, which follows in this order.

    Args:
        tensors: shape and dtype by name.

    Raises:
        ValueError: for a dtype that the format does not have.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in codes:
            raise ValueError(f"{name} must have a dtype that safetensors files know, got {dtype}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # Spaces, which JSON ignores, align the first tensor to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Bytes of a CPU tensor's elements, row-major; a view of the memory of a contiguous tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def open_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file, or of a folder of such files, by name.

    Data is read when it is accessed, so a file may be larger than memory. Writing to the tensors
    does not change the files. What is behind a URL is copied to a temporary file (in ``TMPDIR``),
    which goes with the tensors.

    Args:
        path: a ``.safetensors`` file, or a folder with such files and, where a model is divided
            between several, ``model.safetensors.index.json``; or its URL, which fsspec knows.

    Raises:
        FileNotFoundError: if there is none, or, behind a URL, the index of several is missing.
        ValueError: if a file is cut off or of another format.
    """
    if "://" in str(path):
        storage = Storage(path)
        if not storage.is_local:
            return _open_in_store(storage)
        path = storage.root
    path = Path(path)
    if not path.is_dir():
        return _open_file(path)
    index = path / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [path / name for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds neither {INDEX} nor a file *.safetensors")
    return {name: tensor for file in files for name, tensor in _open_file(file).items()}


class TensorPlace(NamedTuple):
    """Place of a tensor in a file: row-major, from byte ``offset`` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(file: IO[bytes], num_bytes: int, path: str | Path) -> dict[str, TensorPlace]:
    """The tensors of a file by name, as the header says, which is read from its first byte on.

    Args:
        num_bytes: size of the file.
        path: names the file in errors.

    Raises:
        ValueError: if the file is cut off or of another format.
    """
    num_header_bytes = int.from_bytes(file.read(8), "little")
    # At most the file itself: a damaged length may be any number of 64 bits.
    text = file.read(min(num_header_bytes, num_bytes))
    first = 8 + num_header_bytes
    end, places = first, {}
    try:
        header = json.loads(text)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            if start < 0 or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(name)
            places[name] = TensorPlace(dtype, shape, first + start)
            end = max(end, first + stop)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} must be a safetensors file of dtypes {list(DTYPES)}, and its header is not"
        ) from None
    if end != num_bytes:
        raise ValueError(
            f"{path} must have {end} bytes as its header says, got {num_bytes}; it is cut off or "
            "corrupt"
        )
    return places


def _open_file(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        return _mapped(file, path.stat().st_size, path)


def _open_in_store(storage: Storage) -> dict[str, Tensor]:
    """:func:`open_safetensors` of a file or folder that cannot be mapped."""
    try:
        names = storage.names()
    except NotADirectoryError:
        return _fetched(storage, storage.root)
    if INDEX in names:
        weight_map = json.loads(storage.read(storage.path(INDEX)))["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        files = [name for name in names if name.endswith(".safetensors")]
        if not files:
            raise FileNotFoundError(f"{storage.url} holds neither {INDEX} nor a file *.safetensors")
        if unfinished := [name for name in files if _ONE_OF_SEVERAL.search(name)]:
            raise FileNotFoundError(
                f"{storage.url} holds {unfinished[0]} without {INDEX}, as an export does that was "
                "stopped; remove it and export again"
            )
    fetched = (_fetched(storage, storage.path(name)) for name in files)
    return {name: tensor for tensors in fetched for name, tensor in tensors.items()}


def _fetched(storage: Storage, path: str) -> dict[str, Tensor]:
    """The tensors of a file of ``storage``, of which there is a temporary copy as long as they
    are."""
    with tempfile.TemporaryFile() as file:
        with storage.create_stream(path, "rb") as stream:
            shutil.copyfileobj(stream, file, CHUNK_BYTES)
        num_bytes = file.tell()
        file.seek(0)
        return _mapped(file, num_bytes, path)


def _mapped(file: IO[bytes], num_bytes: int, path: str | Path) -> dict[str, Tensor]:
    places = read_header(file, num_bytes, path)
    # A private mapping: torch wants memory that it can write to, and the file must not change.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for name, place in places.items():
        count = math.prod(place.shape)
        if count == 0:
            tensors[name] = torch.empty(place.shape, dtype=place.dtype)
            continue
        flat = torch.frombuffer(mapped, dtype=place.dtype, count=count, offset=place.offset)
        tensors[name] = flat.reshape(place.shape)
    return tensors
