"""Arrays inside an ``.npy`` file or an uncompressed ``.npz`` archive, read where they lie."""

import io
import struct
import zipfile
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from torchembed.data.data_path import ByteRange, DataPath, is_remote, read_ranges

# The fixed part of a zip member's local header; its name and extra field follow, and then the data.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_HEAD_BYTES = 1 << 14
"""Bytes from the beginning of an array that hold its headers; numpy reads none beyond 10,000."""


class RemoteArray:
    """An array ``[rows, ...]`` in a file that fsspec reads: its form, of which slices of rows are
    others, and no elements until :func:`read_arrays` brings them."""

    def __init__(
        self, path: DataPath, dtype: np.dtype[Any], shape: tuple[int, ...], first_byte: int
    ) -> None:
        self.path, self.dtype, self.shape, self.first_byte = path, dtype, shape, first_byte

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def bytes_in_file(self) -> ByteRange:
        num_bytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        return ByteRange(self.path, self.first_byte, self.first_byte + num_bytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "RemoteArray":
        start, stop, step = rows.indices(len(self))
        assert step == 1, rows
        shape = (max(stop - start, 0), *self.shape[1:])
        row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        return RemoteArray(self.path, self.dtype, shape, self.first_byte + start * row_bytes)


StoredArray: TypeAlias = NDArray[Any] | RemoteArray
"""An array that is mapped into memory, or one behind a URL."""


def read_arrays(arrays: Sequence[StoredArray]) -> list[NDArray[Any]]:
    """The elements of arrays, read-only; for those of URLs, all of one file system, at once.

    Raises:
        ValueError: if other numbers of bytes came than the arrays have.
    """
    remote = [array for array in arrays if isinstance(array, RemoteArray)]
    parts = iter(read_ranges([array.bytes_in_file for array in remote]))
    return [
        np.frombuffer(next(parts), array.dtype).reshape(array.shape)
        if isinstance(array, RemoteArray)
        else array
        for array in arrays
    ]


class _Place(NamedTuple):
    """The bytes ``[start, stop)`` of a file that are an ``.npy`` file."""

    where: str
    """File and array, for errors."""
    head: bytes
    start: int
    stop: int


def map_npy(path: DataPath) -> StoredArray:
    """The array of an ``.npy`` file, read-only, its pages read when they are touched; of a URL, a
    :class:`RemoteArray`.

    Raises:
        ValueError: names the file, where it is not a whole ``.npy`` file.
    """
    (head,) = read_ranges([ByteRange(path, 0, _HEAD_BYTES)], is_exact=False)
    return _map_array(path, _Place(str(path), head, 0, path.stat().st_size))


def map_npz(path: DataPath) -> dict[str, StoredArray]:
    """Every array of an ``.npz`` file by name, as :func:`map_npy` gives it.

    Raises:
        ValueError: names the file and the array, where the archive is not whole (its directory is
            at its end), or an array is compressed, which cannot be mapped.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: not a whole .npz archive ({error}); write it again") from error
    except ValueError as error:
        # fsspec's, which names no file, where a web server gives whole files only.
        raise ValueError(f"{path}: parts of it cannot be read ({error})") from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{path}, array {member.filename}: is compressed; write it with numpy.savez"
            )
    offsets = [member.header_offset for member in members]
    ranges = [ByteRange(path, offset, offset + _HEAD_BYTES) for offset in offsets]
    heads = read_ranges(ranges, is_exact=False)
    arrays = {}
    for member, head in zip(members, heads, strict=True):
        where = f"{path}, array {member.filename}"
        if len(head) < _LOCAL_HEADER.size or head[:4] != _LOCAL_MAGIC:
            raise ValueError(f"{where}: not where the archive says; write it again")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(head)
        header_bytes = _LOCAL_HEADER.size + name_bytes + extra_bytes
        start = member.header_offset + header_bytes
        place = _Place(where, head[header_bytes:], start, start + member.file_size)
        arrays[member.filename.removesuffix(".npy")] = _map_array(path, place)
    return arrays


def _map_array(path: DataPath, place: _Place) -> StoredArray:
    where, head, start, stop = place
    file = io.BytesIO(head)
    try:
        version = npy_format.read_magic(file)
        read_header = {
            (1, 0): npy_format.read_array_header_1_0,
            (2, 0): npy_format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read_header(file)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where}: has no .npy header ({error})") from error
    data = start + file.tell()
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if dtype.hasobject:
        raise ValueError(f"{where}: holds objects, not numbers")
    if stop - data != num_bytes:
        raise ValueError(
            f"{where}: {dtype} {list(shape)} takes {num_bytes} bytes, and {max(stop - data, 0)} "
            "are there; it may be cut off, write it again"
        )
    order = "F" if fortran_order else "C"
    if not num_bytes:
        return np.empty(shape, dtype, order)
    if not is_remote(path):
        # As a plain array: slices of a memmap are slow to make.
        return np.asarray(np.memmap(path, dtype, "r", data, shape, order))
    if fortran_order:
        raise ValueError(
            f"{where}: lies column by column, of which no rows can be read through a URL; write "
            "numpy.ascontiguousarray of it"
        )
    return RemoteArray(path, dtype, shape, data)
