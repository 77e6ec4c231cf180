"""Redis servers of a test's own, in processes that it starts and kills."""

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import redis

from tests.support.required_servers import without_server
from tests.support.waiting import LIMIT_SECONDS, wait_until


class RedisServer:
    """A server on a port that stays its own, also while it is down."""

    def __init__(
        self, folder: Path, port: int, *arguments: str, is_encrypted: bool = False
    ) -> None:
        self.folder, self.port = folder, port
        self.address = f"127.0.0.1:{self.port}"
        ports = ("--port", "0", "--tls-port") if is_encrypted else ("--port",)
        self._arguments = (*ports, str(self.port), *arguments)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and return when it takes connections."""
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("redis-server", "--bind", "127.0.0.1"),
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

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which it holds its connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self, **arguments: object) -> redis.Redis:
        return redis.Redis(port=self.port, **arguments)  # type: ignore[arg-type]


@contextmanager
def redis_server(*arguments: str, is_encrypted: bool = False) -> Iterator[RedisServer]:
    """A single server; skips the test where none is installed."""
    with _folder() as folder, reserved_port() as port:
        server = RedisServer(folder, port, *arguments, is_encrypted=is_encrypted)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def redis_cluster(num_nodes: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster without replicas, whose slots are divided evenly; skips as above."""
    with ExitStack() as stack:
        servers = []
        for _ in range(num_nodes):
            # On a busy machine a node may be silent for seconds, and must not be taken for lost.
            port = str(stack.enter_context(reserved_port()))
            options = ("--cluster-port", port, "--cluster-node-timeout", "10000")
            servers.append(
                stack.enter_context(redis_server("--cluster-enabled", "yes", *options)),
            )
        addresses = [server.address for server in servers]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"],
            check=True,
            capture_output=True,
            timeout=LIMIT_SECONDS,
        )
        wait_for_cluster(servers)
        yield servers


def wait_for_cluster(servers: list[RedisServer]) -> None:
    """Return when all servers of a cluster know each other, and answer."""
    wait_until(lambda: all(_is_whole(servers)))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else meanwhile, and that a server may listen at which
    sets ``SO_REUSEADDR``, as Redis does."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def needs_redis() -> None:
    """Skip the test where there is no Redis, or fail it where Redis is required."""
    for program in ("redis-server", "redis-cli"):
        if shutil.which(program) is None:
            without_server("redis", f"needs {program}: apt-get install redis-server")


def _is_whole(servers: list[RedisServer]) -> Iterator[bool]:
    for server in servers:
        with server.client() as client:
            info = client.execute_command("CLUSTER INFO")
        assert isinstance(info, dict)
        yield info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(len(servers))


@contextmanager
def _folder() -> Iterator[Path]:
    needs_redis()
    folder = Path(tempfile.mkdtemp(prefix="torchembed-redis-"))
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
