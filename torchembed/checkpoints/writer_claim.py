"""The right to save in a folder of checkpoints, which one run at a time has."""

import contextlib
import datetime
import errno
import json
import os
import secrets
import socket
import weakref

from torchembed.checkpoints.files.storage import Storage

CLAIM_FILE = "writer.json"
"""File in the folder that names the process which saves there."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of a file system that has no locks."""


class WriterClaim:
    """A process's claim to be the only one that saves in a folder.

    Where the folder is on a file system with locks, local or network, the claim's file is locked:
    another process is refused as long as this one lives, and not after that, however it ended.
    Object stores have no locks, and nobody can tell there whether the last writer lives. So the
    last claim counts: a run that resumes takes the folder over, and the process that had it is
    refused when it next saves.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._path = storage.path(CLAIM_FILE)
        self._token = secrets.token_hex(8)
        self._is_taken = False
        self._unlock: weakref.finalize | None = None
        self.holders: weakref.WeakSet[object] = weakref.WeakSet()
        """Objects of this process that save in the folder."""

    def take(self) -> None:
        """Claim the folder, or make sure that the claim still holds.

        Raises:
            RuntimeError: if another process has the folder; names it.
        """
        written = self._read()
        if self._is_taken and written is not None:
            self.check()
            return
        self._release()
        self._storage.mkdir(self._storage.root)
        if self._storage.is_local:
            self._lock()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        writer = {
            "token": self._token,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": now,
        }
        self._storage.write(self._path, json.dumps(writer).encode())
        self._is_taken = True

    def check(self) -> None:
        """Raise ``RuntimeError`` where another process has taken the folder since."""
        written = self._read()
        if written is None or written.get("token") != self._token:
            raise self._refusal(written)

    def leave(self, holder: object) -> None:
        """Let other processes claim the folder, unless other objects of this process hold it."""
        self.holders.discard(holder)
        if not self.holders:
            self._release()

    def _release(self) -> None:
        self._is_taken = False
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def _lock(self) -> None:
        # Not on every system, and needed on local file systems alone.
        import fcntl

        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise self._refusal(self._read()) from None
            except OSError as error:
                os.close(file)
                if error.errno in _NO_LOCKS:
                    return
                raise
            # The folder may have been removed and made anew between opening and locking. The lock
            # would then be on a file that nobody else opens, so the new file is locked instead.
            if self._is_current(file):
                self._unlock = weakref.finalize(self, os.close, file)
                return
            os.close(file)

    def _is_current(self, file: int) -> bool:
        """True where the path still names the open ``file``, and not one made anew."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False

    def _read(self) -> dict[str, object] | None:
        """The description of the last process that claimed the folder, if there is one."""
        try:
            written = json.loads(self._storage.read(self._path))
        except FileNotFoundError:
            return None
        except ValueError:
            written = None
        # Another process may be writing the file, which then is empty or cut off: it has the claim.
        return written if isinstance(written, dict) else {}

    def _refusal(self, writer: dict[str, object] | None) -> RuntimeError:
        who = "another process"
        if writer and {"process", "host", "since"} <= set(writer):
            who = f"process {writer['process']} on host {writer['host']}"
            who += f", since {writer['since']},"
        return RuntimeError(
            f"one run at a time may save in {self._storage.url}, and {who} does; end that run, or "
            "give this one another folder"
        )


_claims: weakref.WeakValueDictionary[str, WriterClaim] = weakref.WeakValueDictionary()


def claim_of(storage: Storage, holder: object) -> WriterClaim:
    """The claim of this process on a folder, until its last ``holder`` leaves it or is gone."""
    name = os.path.realpath(storage.root) if storage.is_local else storage.url
    claim = _claims.get(name)
    if claim is None:
        claim = _claims[name] = WriterClaim(storage)
    claim.holders.add(holder)
    return claim


def _forget_claims() -> None:
    """Forget all claims, in a forked process: a lock is the parent's, and must not outlive it in a
    child."""
    for claim in list(_claims.values()):
        claim._release()
    _claims.clear()


os.register_at_fork(after_in_child=_forget_claims)
