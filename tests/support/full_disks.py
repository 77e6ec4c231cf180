"""Servers whose rows are on a disk of their own, which others let run full."""

import logging
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.store_processes import mount_disk
from torchembed.serving.configuration import (
    CacheConfig,
    ModelConfig,
    PersistentConfig,
    ServerConfig,
    UpdateConfig,
)
from torchembed.serving.server import Server

GROUP = "full"


def serve_on_a_disk(
    messages: Connection, models: Path, disk: Path, log: Path, brokers: str, num_cached: int
) -> None:
    """Serve model ``m`` with rows in RocksDB and ``num_cached`` of them in the cache; sends the
    address, or None where the system allows no disk.

    ``"fill"`` then takes all that is left of the disk, ``"empty"`` gives it back, and any other
    message ends the server. Each is answered when it is done.
    """
    if not mount_disk(disk, "size=16m"):
        messages.send(None)
        return
    logging.basicConfig(filename=log, level=logging.INFO)
    config = ServerConfig(
        models_folder=models,
        models=(ModelConfig(name="m", cache=CacheConfig(rows=num_cached)),),
        http_address="127.0.0.1:0",
        grpc_address=None,
        volatile=None,
        persistent=PersistentConfig(path=disk / "rows"),
        updates=UpdateConfig(brokers=(brokers,), group=GROUP, poll_timeout_seconds=0.05),
    )
    with Server(config) as server:
        server.start()
        assert server.http is not None
        messages.send(server.http.address)
        while (command := messages.recv()) in ("fill", "empty"):
            if command == "fill":
                _fill(disk / "other files")
            else:
                (disk / "other files").unlink()
            messages.send(command)
    messages.send("ended")


def _fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return
