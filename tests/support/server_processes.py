"""Servers in processes of their own, started by the command that users start them by."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.source_tree import ROOT
from tests.support.waiting import LIMIT_SECONDS


class RunningServer(NamedTuple):
    """A server that is ready."""

    process: subprocess.Popen[str]
    http: str
    """``host:port``."""
    grpc: str
    model: str
    """What it printed of its last model."""
    log: Path
    """Its standard error."""

    def end(self) -> int:
        """Send SIGTERM, and wait for the end; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=LIMIT_SECONDS)


def command(models: Path, *flags: str) -> list[str]:
    """The command that serves a folder, at ports that are free."""
    program = [sys.executable, "-m", "torchembed.serving", "--models", str(models)]
    return [*program, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *flags]


@contextlib.contextmanager
def running_server(models: Path, log: Path, *flags: str) -> Iterator[RunningServer]:
    """A server of ``models`` that is ready; it is killed where it has not ended by itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command(models, *flags),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=ROOT,
        )
    try:
        assert process.stdout is not None
        printed: dict[str, str] = {}
        for line in process.stdout:
            if line.strip() == "ready":
                break
            name, _, value = line.strip().partition(": ")
            printed[name] = value
        else:
            raise RuntimeError(f"the server ended before it was ready: {log.read_text()}")
        yield RunningServer(process, printed["http"], printed["grpc"], printed["model"], log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
