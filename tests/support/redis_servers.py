"""Redis servers of a test's own, in processes that it starts and kills."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

LIMIT_SECONDS = 60.0


class RedisServer:
    """A server on a port of its own."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None) -> None:
        self.folder = folder
        self.port = free_port() if port is None else port
        self.address = f"127.0.0.1:{self.port}"
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and return when it takes connections."""
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("redis-server", "--bind", "127.0.0.1", "--port", str(self.port)),
                    *("--dir", str(self.folder), "--save", "", *self._arguments),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        wait_until(lambda: "Ready to accept connections" in self.log(), self.log)

    def log(self) -> str:
        assert self._process is not None
        text = (self.folder / "log").read_text()
        assert self._process.poll() is None, f"redis-server ended: {text}"
        return text

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, **arguments: object) -> redis.Redis:
        return redis.Redis(port=self.port, **arguments)  # type: ignore[arg-type]


@contextmanager
def redis_server(*arguments: str) -> Iterator[RedisServer]:
    """A single server; skips the test where none is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with _folder() as folder:
        server = RedisServer(folder, *arguments)
        try:
            server.start()
            yield server
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(is_so: Callable[[], bool], say: Callable[[], str] | None = None) -> None:
    """Ask until a condition holds, which must be before the limit."""
    end = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, say() if say else "it does not come true"
        time.sleep(0.005)


def needs_redis() -> None:
    """Skip the test where there is no Redis."""
    for program in ("redis-server", "redis-cli"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install redis-server")


@contextmanager
def _folder() -> Iterator[Path]:
    needs_redis()
    folder = Path(tempfile.mkdtemp(prefix="torchembed-redis-"))
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
