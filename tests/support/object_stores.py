"""Folders behind URLs: in fsspec's memory, and in a server that speaks S3."""

import contextlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def folder_of_url(protocol: str) -> Iterator[str]:
    """The URL of a new folder, ``memory://`` or ``s3://``, until the context ends.

    That of S3 is in a server of this process, which fsspec's S3 talks to meanwhile.
    """
    fsspec = pytest.importorskip("fsspec", reason="URLs are read with fsspec")
    name = f"clicks-{secrets.token_hex(4)}"
    if protocol == "memory":
        yield f"memory://{name}"
        fsspec.filesystem("memory").rm(name, recursive=True)
        return
    pytest.importorskip("s3fs", reason="S3 is spoken with s3fs")
    moto = pytest.importorskip("moto.server", reason="moto's server speaks S3")
    # It would log each request.
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3 = type(fsspec.filesystem("s3"))
        s3.clear_instance_cache()
        try:
            fsspec.filesystem("s3").mkdir(name)
            yield f"s3://{name}/folder"
        finally:
            s3.clear_instance_cache()
            server.stop()


def upload(folder: Path, url: str) -> str:
    """Copy the files of a local folder, also those in its folders, to ``url``, and return that."""
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return url


def download(url: str) -> dict[str, bytes]:
    """The files behind ``url``, by their paths below it."""
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    files.invalidate_cache()
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


def counted_ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The file and the number of bytes of each answer that fsspec's S3 gets from now on."""
    s3fs = pytest.importorskip("s3fs")
    ranges: list[tuple[str, int]] = []
    fetch, cat = s3fs.S3File._fetch_range, s3fs.S3FileSystem._cat_file

    def fetch_range(file: Any, start: int, end: int) -> bytes:
        found = fetch(file, start, end)
        ranges.append((file.path.rsplit("/", 1)[-1], len(found)))
        return found

    async def cat_file(files: Any, path: str, *args: Any, **options: Any) -> bytes:
        found = await cat(files, path, *args, **options)
        ranges.append((path.rsplit("/", 1)[-1], len(found)))
        return found

    monkeypatch.setattr(s3fs.S3File, "_fetch_range", fetch_range)
    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat_file)
    return ranges
