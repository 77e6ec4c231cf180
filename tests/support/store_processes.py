"""What processes do with a store on disk that another one then kills, or finds in its way."""

import contextlib
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.fork_server import fork_server
from torchembed.stores import RocksDBOptions, RocksDBStore, RowStoreError

LIMIT_SECONDS = 300.0
LINE_BYTES = 1024
NUM_KEYS = 1000
BATCH_KEYS = 100
SMALL = RocksDBOptions(write_buffer_bytes=1 << 19)
"""Buffers that a few batches fill, so that files are written and merged all the time."""

_NEW_MOUNTS, _NEW_USER, _REMOUNT = 0x20000, 0x10000000, 0x20
_NOBODY = 65534


class Running(NamedTuple):
    process: ForkServerProcess
    messages: Connection

    def next_message(self) -> Any:
        """The next message, which must come before the limit."""
        assert self.messages.poll(LIMIT_SECONDS), "a process says nothing"
        return self.messages.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_SECONDS)
        assert self.process.exitcode == -signal.SIGKILL


def start(function: Callable[..., None], *arguments: Any) -> Running:
    """``function(messages, *arguments)`` in a process of its own, with no thread but the first."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return Running(process, ours)


def result_of(function: Callable[..., None], *arguments: Any) -> Any:
    """The one message of a process, which must then end."""
    running = start(function, *arguments)
    result = running.next_message()
    running.process.join(LIMIT_SECONDS)
    assert running.process.exitcode == 0
    return result


def batch(version: int) -> tuple[Tensor, Tensor]:
    """Keys and lines of a version: every eight bytes of a line are the version, or the key."""
    keys = (37 * version + torch.arange(BATCH_KEYS)) % NUM_KEYS
    pairs = torch.stack([torch.full_like(keys, version), keys], dim=1)
    return keys, pairs.tile(1, LINE_BYTES // 16).view(torch.uint8)


def versions(store: RocksDBStore) -> Tensor:
    """The version that each key has, 0 where it has none; all lines must be whole."""
    lines = torch.zeros(NUM_KEYS, LINE_BYTES, dtype=torch.uint8)
    found = store.table("t", LINE_BYTES).read(torch.arange(NUM_KEYS), lines)
    numbers = lines.view(torch.int64).view(NUM_KEYS, -1, 2)
    assert (numbers == numbers[:, :1]).all(), "a line mixes two"
    assert torch.equal(numbers[found, 0, 1], torch.arange(NUM_KEYS)[found])
    assert torch.equal(numbers[:, 0, 0] > 0, found)
    return numbers[:, 0, 0]


def versions_after(last: int) -> Tensor:
    """What ``versions`` gives where all up to ``last`` were written whole, and no other."""
    expected = torch.zeros(NUM_KEYS, dtype=torch.int64)
    for version in range(1, last + 1):
        expected[batch(version)[0]] = version
    return expected


def hold(messages: Connection, folder: Path) -> None:
    """Have the store open until it is killed."""
    with RocksDBStore(folder):
        messages.send(os.getpid())
        messages.recv()


def hold_to_read(messages: Connection, folder: Path) -> None:
    """Have the store open to read it until it is killed; sends its versions."""
    with RocksDBStore.open_read_only(folder) as store:
        messages.send(versions(store).tolist())
        messages.recv()


def write_until_killed(messages: Connection, folder: Path, first: int) -> None:
    """Write version after version, and say so when it is written; each tenth is synced before."""
    messages.send(first - 1)
    with RocksDBStore(folder, SMALL) as store:
        table = store.table("t", LINE_BYTES)
        for version in range(first, first + 100_000):
            table.write(*batch(version))
            if version % 10 == 0:
                store.sync()
            messages.send(version)


def write_and_wait(messages: Connection, folder: Path, last: int) -> None:
    """Write the versions up to ``last``, which no buffer is full of, and have the store open until
    it is killed."""
    with RocksDBStore(folder) as store:
        for version in range(1, last + 1):
            store.table("t", LINE_BYTES).write(*batch(version))
        messages.send(last)
        messages.recv()


def write_failing(store: RocksDBStore) -> str:
    """What the store says of a write that cannot be done."""
    try:
        store.table("t", LINE_BYTES).write(*batch(1000))
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    return "it writes again"


def write_until_it_fails(store: RocksDBStore) -> tuple[int, list[str]]:
    """Last version that could be written, and what the store says then, and once more."""
    table = store.table("t", LINE_BYTES)
    last = 0
    try:
        for version in range(1, 1000):
            table.write(*batch(version))
            last = version
    except OSError as error:
        told = [f"{type(error).__name__} {error}"]
    else:
        told = ["it never fails"]
    told.append(write_failing(store))
    assert torch.equal(versions(store), versions_after(last)), "what was written cannot be read"
    return last, told


def write_up_to_a_limit(messages: Connection, folder: Path, limit_bytes: int) -> None:
    """Write until files may not grow further."""
    store = RocksDBStore(folder, SMALL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    result = write_until_it_fails(store)
    with contextlib.suppress(OSError, RowStoreError):
        store.close()
    messages.send(result)


def mount_disk(folder: Path, settings: str, *, is_there: bool = False) -> bool:
    """Mount a disk in memory, which this process alone sees and which goes with it, or change the
    settings of one that is there; False where the system allows none."""
    libc = ctypes.CDLL(None)
    spaces = _NEW_MOUNTS if os.geteuid() == 0 else _NEW_MOUNTS | _NEW_USER
    if not is_there and libc.unshare(spaces) != 0:
        return False
    flags = _REMOUNT if is_there else 0
    return libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, settings.encode()) == 0


def fill_a_disk(messages: Connection, folder: Path) -> None:
    """Write until a disk of three megabytes is full, then with room for its files to grow and for
    no further one, then with room for all. Sends None where the system allows no such disk."""
    if not mount_disk(folder, "size=3m,nr_inodes=1000"):
        messages.send(None)
        return
    store = RocksDBStore(folder / "store", SMALL)
    last, told = write_until_it_fails(store)
    disk = os.statvfs(folder)
    num_files = disk.f_files - disk.f_ffree + 1
    assert mount_disk(folder, f"size=100m,nr_inodes={num_files}", is_there=True)
    for _ in range(2):
        told.append(write_failing(store))
        assert torch.equal(versions(store), versions_after(last)), "what was written cannot be read"
    assert mount_disk(folder, "size=100m,nr_inodes=1000", is_there=True)
    store.table("t", LINE_BYTES).write(*batch(last + 1))
    found = [versions(store).tolist()]
    store.close()
    with RocksDBStore(folder / "store", SMALL) as store:
        found.append(versions(store).tolist())
    messages.send((last, told, found))


def open_without_rights(messages: Connection, folder: Path) -> None:
    """Open a store as a user who may not write there, which the first user always may."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setuid(_NOBODY)
    try:
        RocksDBStore(folder)
    except OSError as error:
        messages.send(f"{type(error).__name__} {error}")


def fork_with_a_store(messages: Connection, folder: Path) -> None:
    """Fork while a store is open; what the fork is told comes back, and that the store goes on."""
    store = RocksDBStore(folder)
    table = store.table("t", LINE_BYTES)
    table.write(*batch(1))
    told = os.pipe()
    if os.fork() == 0:
        errors = []
        for use in (lambda: versions(store), lambda: RocksDBStore(folder.parent / "another")):
            try:
                use()
            except RuntimeError as error:
                errors.append(str(error))
        del store, table, use
        gc.collect()
        os.write(told[1], "\n".join(errors).encode())
        os._exit(0)
    os.close(told[1])
    with os.fdopen(told[0], "rb") as pipe:
        errors = pipe.read().decode().splitlines()
    assert torch.equal(versions(store), versions_after(1))
    store.close()
    messages.send(errors)


def write_and_checkpoint_until_killed(messages: Connection, folder: Path) -> None:
    """Write version after version, say so, and save each in a folder of its own."""
    with RocksDBStore(folder / "store", SMALL) as store:
        table = store.table("t", LINE_BYTES)
        for version in range(1, 100_000):
            table.write(*batch(version))
            messages.send(version)
            store.checkpoint(folder / f"saved-{version}")


def restore_until_killed(messages: Connection, folder: Path, versions_saved: list[int]) -> None:
    """Restore one checkpoint after another, and say so before."""
    with RocksDBStore(folder / "store", SMALL) as store:
        while True:
            for version in versions_saved:
                messages.send(version)
                store.restore(folder / f"saved-{version}")
