"""Servers that are killed between applying updates and committing them."""

import dataclasses
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from torchembed.serving.__main__ import main
from torchembed.serving.server import server
from torchembed.streams import SourceOptions, UpdateSource


class _DyingSource(UpdateSource):
    """Kills its process in place of the first commit of rows. Its group misses it soon."""

    def __init__(self, brokers: str, group: str, options: SourceOptions, **named: Any) -> None:
        options = dataclasses.replace(options, session_timeout_seconds=1.0)
        super().__init__(brokers, group, options, **named)

    def commit(self) -> None:
        if self.statistics.num_rows:
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit()


def serve_until_killed(messages: Connection, arguments: Sequence[str]) -> None:
    """Serve as the command does, until rows were applied that are still to be committed."""
    server.UpdateSource = _DyingSource  # type: ignore[misc]
    messages.send(main(arguments))
