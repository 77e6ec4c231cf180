"""The server that the tests' processes are forked from, which has imported what most of them need.

Importing takes a process seconds. Python has one such server for each process of tests, which
imports what the first caller names: so all callers name the same.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

from tests.support.rank_processes import IMPORTED


def fork_server() -> ForkServerContext:
    """What makes processes, with no thread but the first, and pipes to them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context
