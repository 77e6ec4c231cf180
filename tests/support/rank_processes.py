"""Starts processes of ranks in hundredths of a second, by forking one that has imported torch.

Importing torch takes a process seconds, and optimizers import Dynamo, too. A template has imported
both and done nothing else, so what is forked from it is as if just started. Ranks of even and of
odd numbers are forked from two templates: Python gives each process that it starts other hashes of
strings, so a set is in another order on the next rank, and no result may depend on that.

A template passes on what its ranks send, and says how each of them ended.
"""

import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

NUM_TEMPLATES = 2
IMPORTED = ("torch._dynamo", "torchembed.training", "pytest")
"""Modules that ranks find imported, of which modules of tests import pytest. Nothing that asks for
GPUs, which no process can use that was forked from one that did."""
LOOK_SECONDS = 0.5
"""How often a template looks for a rank that ended while a child of it holds its pipe open."""


class Forked(NamedTuple):
    """The first message about a rank."""

    rank: int
    pid: int


class Ended(NamedTuple):
    """The last message about a rank: its exit status, or minus the signal that ended it."""

    rank: int
    status: int


class _Start(NamedTuple):
    rank: int
    call: bytes
    """A pickled function and its arguments; unpickled by the rank, which imports its module."""
    folder: str
    environment: dict[str, str]


class _EndAll(NamedTuple):
    """Asks for the end of all ranks, and answers that they have ended."""


class _Running(NamedTuple):
    rank: int
    pid: int
    messages: Connection


def _serve(orders: Connection) -> None:
    """The loop of a template, which lasts as long as the tests' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # by Ctrl-C the tests' process ends the ranks
    for name in IMPORTED:
        importlib.import_module(name)

    assert threading.active_count() == 1, "a process with several threads cannot be forked"
    gc.collect()
    gc.freeze()  # else the ranks' collectors touch, and so copy, what they share
    running: list[_Running] = []
    try:
        while True:
            pipes = [one.messages for one in running]
            ready = connection.wait([orders, *pipes], timeout=LOOK_SECONDS if running else None)
            if orders in ready:
                order = orders.recv()
                if isinstance(order, _Start):
                    running.append(_fork(order, unused=[orders, *pipes]))
                    orders.send(Forked(order.rank, running[-1].pid))
                else:
                    for one in running.copy():
                        _pass_on(one, orders, running)
                    _end(running)
                    orders.send(order)
            for one in running.copy():
                if not ready or one.messages in ready:
                    _pass_on(one, orders, running)
    except EOFError:
        pass  # of the orders: the tests' process has ended
    finally:
        _end(running)


def _fork(order: _Start, unused: Sequence[Connection]) -> _Running:
    receiver, sender = connection.Pipe(duplex=False)
    pid = os.fork()
    if pid != 0:
        sender.close()
        return _Running(order.rank, pid, receiver)
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (receiver, *unused):
            other.close()
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.folder)
        function, arguments = pickle.loads(order.call)
        function(sender, *arguments)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and not in the template's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _pass_on(one: _Running, orders: Connection, running: list[_Running]) -> None:
    """Send on what the rank sent; where it ended, say so and take it out of ``running``."""
    pid, status = os.waitpid(one.pid, os.WNOHANG)
    while one.messages.poll():
        try:
            message = one.messages.recv_bytes()
        except (EOFError, OSError):  # it ended, perhaps in the middle of a message
            if pid == 0:
                pid, status = os.waitpid(one.pid, 0)
            break
        orders.send_bytes(message)
    if pid != 0:
        running.remove(one)
        one.messages.close()
        orders.send(Ended(one.rank, os.waitstatus_to_exitcode(status)))


def _end(running: list[_Running]) -> None:
    for one in running:
        os.kill(one.pid, signal.SIGKILL)
    for one in running:
        os.waitpid(one.pid, 0)
        one.messages.close()
    running.clear()


@functools.cache
def _template(number: int) -> Connection:
    """The tests' process's end of the pipe to a template, which is started on the first call."""
    context = get_context("spawn")
    orders, theirs = context.Pipe()
    name = f"template of ranks {number}"
    context.Process(target=_serve, args=(theirs,), name=name, daemon=True).start()
    theirs.close()
    return orders


class RankProcesses:
    """``function(messages, *arguments)`` on a process for each of ``arguments``, one after another;
    by ``messages.send`` the function sends what :meth:`messages` gives here."""

    def __init__(self, function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._orders = [_template(number) for number in range(min(len(arguments), NUM_TEMPLATES))]
        environment, folder = dict(os.environ), os.getcwd()
        for rank, of_rank in enumerate(arguments):
            call = pickle.dumps((function, of_rank))
            order = _Start(rank, call, folder, environment)
            self._orders[rank % NUM_TEMPLATES].send(order)

    def messages(self, timeout_seconds: float) -> Iterator[Any]:
        """The messages that came, from any rank, within the time: :class:`Forked` first and
        :class:`Ended` last of each rank. Nothing where it passes."""
        for orders in connection.wait(self._orders, timeout_seconds):
            assert isinstance(orders, Connection)
            try:
                message = orders.recv()
            except EOFError as error:
                raise AssertionError("a template of ranks failed: see standard error") from error
            yield message

    def end(self) -> list[Any]:
        """Kill the ranks that run; all have ended then. Returns what :meth:`messages` has not given
        of all that the ranks sent before."""
        left = []
        for orders in self._orders:
            orders.send(_EndAll())
        for orders in self._orders:
            while not isinstance(message := orders.recv(), _EndAll):
                left.append(message)
        return left
