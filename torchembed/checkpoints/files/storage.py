"""Files of checkpoints, on local disks and wherever else fsspec reaches."""

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystemBase

from torchembed.core.urls import is_url

CHUNK_BYTES = 1 << 24
"""Size of the reads from which a checksum is computed."""


class FileDigest(NamedTuple):
    """Size and checksum of a file, which differ where it was cut off or changed."""

    num_bytes: int
    crc32: int | None
    """None for a file that is too large to be read for it, and that whoever reads it checks."""


class _DigestWriter(io.RawIOBase):
    """Stream that passes on what is written to it and computes its digest."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = FileDigest(0, 0)
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:
        num_bytes = memoryview(data).nbytes
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        crc32 = zlib.crc32(data, self.digest.crc32 or 0)
        self.digest = FileDigest(self.digest.num_bytes + num_bytes, crc32)
        return num_bytes

    def tell(self) -> int:
        return self.digest.num_bytes

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()


class Storage(FileSystemBase):
    """A folder, local or remote, in the form in which ``torch.distributed.checkpoint`` uses it.

    ``written`` holds the digest of each file that this process wrote, by path. ``is_local`` is true
    on file systems of the operating system, network ones too.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        self._fs, self.root = _open_filesystem(url)
        self.is_local = "file" in _protocols(self._fs)
        self.written: dict[str, FileDigest] = {}

    def path(self, *names: str) -> str:
        """Path of a file or folder below the root."""
        return "/".join((self.root.rstrip("/"), *names))

    def names(self) -> list[str]:
        """Names of the files and folders in the root; none where the root does not exist yet.

        Raises:
            NotADirectoryError: if the root is a file.
        """
        # fsspec may answer from a listing that it has kept, but other processes write there too.
        self._fs.invalidate_cache()
        if not self._fs.exists(self.root):
            return []
        if not self._fs.isdir(self.root):
            raise NotADirectoryError(f"{self.url} must be a folder, and is a file")
        entries = self._fs.ls(self.root, detail=False)
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        self._fs.invalidate_cache()
        return self._fs.exists(os.fspath(path))

    def read(self, path: str) -> bytes:
        self._fs.invalidate_cache()
        return self._fs.cat_file(path)

    def num_bytes(self, path: str) -> int:
        """Size of a file.

        Raises:
            FileNotFoundError: if there is none.
        """
        self._fs.invalidate_cache()
        return self._fs.size(path)

    def write(self, path: str, data: bytes) -> None:
        with self.create_stream(path, "wb") as stream:
            stream.write(data)

    def digest(self, path: str) -> FileDigest:
        """Digest of a file as it now is; reads the whole file."""
        num_bytes, crc32 = 0, 0
        with self._fs.open(path, "rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                crc32 = zlib.crc32(chunk, crc32)
        return FileDigest(num_bytes, crc32)

    def check_unchanged(self, path: str, wanted: FileDigest, advice: str) -> None:
        """Raise ``ValueError`` where a file is not as it was written, which ``wanted`` describes;
        reads the whole file where that has a checksum.

        Args:
            advice: what to do then, as "export again".
        """
        must_have = f"{wanted.num_bytes} bytes"
        if wanted.crc32 is None:
            found = FileDigest(self.num_bytes(path), None)
            has = f"{found.num_bytes}"
        else:
            found = self.digest(path)
            must_have += f" and CRC-32 {wanted.crc32:08x}"
            has = f"{found.num_bytes} and {found.crc32:08x}"
        if found != wanted:
            raise ValueError(
                f"file {path} must have {must_have} as it was written, got {has}; it is corrupt: "
                f"{advice}"
            )

    def fetch(self, path: str, target: str) -> None:
        """Copy a folder with all its content to a new local one."""
        self._fs.invalidate_cache()
        self._fs.get(path.rstrip("/") + "/", target, recursive=True)

    def upload(self, source: Path, path: str) -> None:
        """Copy a local file to ``path``; object stores show only whole copies."""
        self._fs.put_file(str(source), path)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all its content, if it exists."""
        self._fs.invalidate_cache()
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = os.fspath(path)
        with self._fs.open(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            writer = _DigestWriter(stream)
            try:
                yield writer
            except RuntimeError:
                # torch.save puts an error of its own in place of the stream's.
                if writer.error is not None:
                    raise writer.error from None
                raise
            writer.close()
            # The file must be on the disk before the marker is: after a crash of the machine a
            # marker could else stand for files that were never written.
            if self.is_local:
                stream.flush()
                os.fsync(stream.fileno())
        self.written[path] = writer.digest

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Move a file in one atomic step; object stores copy it, and show only whole copies."""
        path, new_path = os.fspath(path), os.fspath(new_path)
        self._fs.mv(path, new_path)
        self.written[new_path] = self.written.pop(path)

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm_file(os.fspath(path))


def _open_filesystem(url: str | Path) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    if not is_url(url):
        url = str(Path(url).absolute())
    try:
        return url_to_fs(url)
    except ValueError as error:
        raise ValueError(
            f"path must be a local path or a URL that fsspec knows, got {url!r}: {error}"
        ) from None
    except ImportError as error:
        raise ImportError(f"path {url!r} needs a package that is not here: {error}") from None


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
