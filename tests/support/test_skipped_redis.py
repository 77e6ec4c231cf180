"""A run that skips all tests of Redis fails where there is a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skipped_redis import were_all_skipped
from tests.support.source_tree import ROOT


@pytest.fixture
def folder_of_server(tmp_path: Path) -> Path:
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    return tmp_path


def test_a_run_without_redis_fails_where_it_is_there(folder_of_server: Path) -> None:
    (folder_of_server / "test_redis.py").write_text(
        "import pytest\n\ndef test_store():\n    pytest.skip('for no reason')\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", ".", "."],
        check=False,
        cwd=folder_of_server,
        env={**os.environ, "PATH": str(folder_of_server), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert "redis-server is installed, and yet all tests of Redis were skipped" in run.stdout


def test_some_may_be_skipped_and_all_where_there_is_none(
    folder_of_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder_of_server))
    assert were_all_skipped(passed=["test_a.py::x"], skipped=["test_redis.py::x"])
    assert not were_all_skipped(passed=["test_redis.py::y"], skipped=["test_redis.py::x"])
    assert not were_all_skipped(passed=["test_a.py::x"], skipped=["test_a.py::y"])
    monkeypatch.setenv("PATH", "")
    assert not were_all_skipped(passed=["test_a.py::x"], skipped=["test_redis.py::x"])
