"""The end of a process that may not end by itself."""

import ctypes
import faulthandler
import os
import signal
import sys

_STDERR = 2
_PR_SET_PDEATHSIG = 1
"""Linux's number of the ``prctl`` for a signal at the parent's end."""


def exit_process_within(seconds: float) -> None:
    """End the process with code 1 after ``seconds``, whatever it waits for by then, and print each
    thread's traceback first.

    For a process whose GPU hangs: an exception may not end it, since CUDA and NCCL wait for the GPU
    while the interpreter closes. The thread that ends it is faulthandler's own, since Python's
    threads are gone by that time.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def exit_process_with_parent() -> None:
    """Have the kernel kill this process, by SIGKILL, when its parent ends, however that happens.

    For a rank under ``torchrun``, which cannot end its ranks where it is killed itself: they would
    train on, and write what the resumed run writes. Linux only; nothing happens elsewhere. What
    counts is the parent's thread that started this process, for ``torchrun`` its main thread.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot follow the parent's end: {os.strerror(error)}")
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)
