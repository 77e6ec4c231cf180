"""The end of a process that may not end by itself."""

import faulthandler

_STDERR = 2


def exit_process_within(seconds: float) -> None:
    """Let the process exit with code 1 after ``seconds``, whatever it waits for by then; before
    that, what each thread is doing is printed.

    For a process whose GPU hangs: an exception may not be its end, since CUDA and NCCL wait for the
    GPU while the interpreter closes. The thread that ends it is not one of Python's, which are gone
    at that time.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
