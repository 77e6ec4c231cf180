"""Ctrl-C waits for the end of the context."""

import signal
import threading

import pytest

from torchembed.tables.deferred_interrupts import interrupts_deferred

pytestmark = pytest.mark.usefixtures("interrupting_ctrl_c")


def test_ctrl_c_is_raised_at_the_end() -> None:
    handler, done = signal.getsignal(signal.SIGINT), []

    @interrupts_deferred()
    @interrupts_deferred()
    def change() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is handler
    with interrupts_deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_is_raised_after_an_error() -> None:
    @interrupts_deferred()
    def change(*, is_interrupted: bool) -> None:
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        raise ValueError("of what is within")

    with pytest.raises(KeyboardInterrupt) as raised:
        change(is_interrupted=True)
    assert isinstance(raised.value.__context__, ValueError)
    with pytest.raises(ValueError, match="of what is within"):
        change(is_interrupted=False)


def test_a_handler_of_the_caller_gets_the_signal() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert not came
        assert came == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_deferred():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_handlers_alone() -> None:
    found = []

    def look() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
