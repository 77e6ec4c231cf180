"""NVIDIA's Triton Inference Server, from the wheel that holds it, as a process of its own."""

import fcntl
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.required_servers import without_server

_WHEEL = "nvidia-pytriton==0.7.0"
_INSTALL_LIMIT_SECONDS = 120.0
_START_LIMIT_SECONDS = 300.0
_END_LIMIT_SECONDS = 30.0
_STUB = "triton_python_backend_stub"


class TritonServer:
    """A server on loopback over a model repository; a context manager that ends it.

    Args:
        repository: a folder of models.
        log: a file for what the server writes.
        models: names of the models to load at start, after which it is ready.
    """

    def __init__(self, repository: Path, log: Path, models: list[str]) -> None:
        self.log = log
        for attempt in range(3):
            ports = _free_ports(3)
            self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
            self._process = self._start(repository, models, ports)
            if self._is_ready():
                return
            self.stop()
            # Another process may have taken a port meanwhile.
            if "in use" not in self.log.read_text().lower() or attempt == 2:
                raise RuntimeError(f"Triton does not start:\n{self.log.read_text()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End the server; returns when it has ended."""
        self._process.terminate()
        try:
            self._process.wait(_END_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(
        self, repository: Path, models: list[str], ports: list[int]
    ) -> subprocess.Popen[bytes]:
        site = _installed_wheel()
        server = site / "pytriton" / "tritonserver"
        names = ("http", "grpc", "metrics")
        command = [
            str(server / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={server / 'backends'}",
            "--model-control-mode=explicit",
            "--disable-auto-complete-config",
            "--exit-timeout-secs=5",
            *(f"--load-model={model}" for model in models),
            *(f"--{name}-address=127.0.0.1" for name in names),
            *(f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)),
        ]
        libraries = [sysconfig.get_config_var("LIBDIR"), str(site / "nvidia_pytriton.libs")]
        environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
        with self.log.open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _is_ready(self) -> bool:
        """True when the server is ready, false when it has ended."""
        end = time.monotonic() + _START_LIMIT_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5):
                    return True
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)  # nothing tells when a server listens
        return False


def require_triton() -> None:
    """Skip the test where the server cannot be had, or fail it where the server is required."""
    reason = _reason_without_triton()
    if reason is not None:
        without_server("triton", f"needs NVIDIA's Triton server: {reason}")


@cache
def _reason_without_triton() -> str | None:
    if sys.platform != "linux":
        return "it is for Linux"
    library = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
    if not library.is_file() or ".so" not in library.name:
        return f"its Python backend needs Python's shared library, and {library} is none"
    try:
        site = _installed_wheel()
    except (subprocess.SubprocessError, OSError) as error:
        return f"{_WHEEL} cannot be installed: {error}"
    if not (site / "pytriton/tritonserver/backends/python" / _STUB).is_file():
        return f"{_WHEEL} has no Python backend for Python {_python_version()}"
    return None


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@cache
def _installed_wheel() -> Path:
    """The folder that the wheel is installed in, apart from this environment: it pins old packages,
    which its server does not need."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    site = caches / "torchembed" / f"{_WHEEL.replace('==', '-')}-python{_python_version()}"
    site.mkdir(parents=True, exist_ok=True)
    with (site / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (site / "installed").exists():
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--retries=1",
            ]
            subprocess.run(
                [*install, "--upgrade", f"--target={site}", _WHEEL],
                check=True,
                capture_output=True,
                timeout=_INSTALL_LIMIT_SECONDS,
            )
            server = site / "pytriton" / "tritonserver"
            stub = server / "python_backend_stubs" / _python_version() / _STUB
            if stub.is_file():
                (server / "backends" / "python" / _STUB).hardlink_to(stub)
            (site / "installed").touch()
    return site


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()
