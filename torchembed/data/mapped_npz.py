"""Arrays inside an uncompressed ``.npz`` archive, mapped into memory where they lie."""

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

# The fixed part of a zip member's local header; its name and extra field follow, and then the data.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\x03\x04"


def map_npy(path: Path) -> NDArray[Any]:
    """The array of an ``.npy`` file, read-only, its pages read when they are touched.

    Raises:
        ValueError: names the file, where it is not a whole ``.npy`` file.
    """
    return _map_array(path, 0, path.stat().st_size, str(path))


def map_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of an ``.npz`` file by name, read-only, mapped in place; as :func:`map_npy`.

    Raises:
        ValueError: names the file and the array, where the archive is not whole (its directory is
            at its end), or an array is compressed, which cannot be mapped.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: not a whole .npz archive ({error}); write it again") from error
    arrays = {}
    with open(path, "rb") as file:
        for member in members:
            where = f"{path}, array {member.filename}"
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{where}: is compressed; write it with numpy.savez")
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != _LOCAL_MAGIC:
                raise ValueError(f"{where}: not where the archive says; write it again")
            _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            stop = start + member.file_size
            arrays[member.filename.removesuffix(".npy")] = _map_array(path, start, stop, where)
    return arrays


def _map_array(path: Path, start: int, stop: int, where: str) -> NDArray[Any]:
    with open(path, "rb") as file:
        file.seek(start)
        try:
            version = npy_format.read_magic(file)
            read_header = {
                (1, 0): npy_format.read_array_header_1_0,
                (2, 0): npy_format.read_array_header_2_0,
            }[version]
            shape, fortran_order, dtype = read_header(file)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{where}: has no .npy header ({error})") from error
        data = file.tell()
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
    # As a plain array: slices of a memmap are slow to make.
    return np.asarray(np.memmap(path, dtype, "r", data, shape, order))
