"""A process ends in time, whatever its end waits for."""

import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT

PROGRAM = """
import ctypes
import sys
from torchembed.core.ranks.process_exit import exit_process_within

class Hangs:
    def __init__(self):
        self.pause = ctypes.CDLL(None).pause

    def __del__(self):
        self.pause()

def say_and_end(*error):
    sys.__excepthook__(*error)
    exit_process_within(1)

kept = Hangs()
sys.excepthook = say_and_end
raise TimeoutError("the GPU hangs")
"""


def test_a_process_that_hangs_while_it_closes_is_ended() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 1
    assert "TimeoutError: the GPU hangs" in run.stderr
    # Without it the process would wait for ever.
    assert "Timeout (0:00:01)!" in run.stderr


PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-W", "ignore", "-c", sys.argv[1]], stdin=subprocess.DEVNULL)
os.close(1)
sys.stdin.read()
"""
CHILD = """
import signal
from torchembed.core.ranks.process_exit import exit_process_with_parent
exit_process_with_parent()
print("follows its parent", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel tells of parents")
def test_a_process_ends_with_its_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "follows its parent\n"
    finally:
        parent.kill()
    # Only once the child is gone too has the pipe that it writes to an end.
    assert parent.communicate(timeout=240)[0] == ""
