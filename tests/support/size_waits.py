"""Which threads wait for the sizes of batches."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torchembed.core.host_numbers import HostNumbers
from torchembed.sharding.transport.jagged_route import JaggedRoute
from torchembed.step.batches.bucketized_buffers import BucketizedBuffers

NOT_THE_MAIN_ONE = {"torchembed: sizes of batches to come"}


@contextlib.contextmanager
def threads_that_wait() -> Iterator[set[str]]:
    """The names of the threads that meanwhile wait for sizes, a device's or other ranks'."""
    threads: set[str] = set()
    waiting = [
        (HostNumbers, "tolist"),
        (JaggedRoute, "exchange_sizes"),
        (BucketizedBuffers, "needed"),
    ]
    with contextlib.ExitStack() as stack:
        for holder, name in waiting:
            function = getattr(holder, name)

            def noted(*arguments: Any, function: Any = function, **named: Any) -> Any:
                threads.add(threading.current_thread().name)
                return function(*arguments, **named)

            setattr(holder, name, noted)
            stack.callback(setattr, holder, name, function)
        yield threads
