"""The access log: one JSON line a request."""

import json
import logging
import time
from typing import NamedTuple

logger = logging.getLogger("torchembed.serving.access")
"""Each record's message is the line; programs give it the handler that writes it."""


class Access(NamedTuple):
    """What the access log says of a request."""

    protocol: str
    """``http`` or ``grpc``."""
    call: str
    """Method and path, or the name of the gRPC method."""
    client: str
    status: int | str
    """Of HTTP, or the name of gRPC's."""
    seconds: float
    request_bytes: int
    response_bytes: int
    model: str | None = None
    version: str | None = None
    num_default_rows: int | None = None
    error: str | None = None


def write(access: Access) -> None:
    """Log a request, without what is None."""
    if not logger.isEnabledFor(logging.INFO):
        return
    line = {name: value for name, value in access._asdict().items() if value is not None}
    line["seconds"] = round(access.seconds, 6)
    logger.info("%s", json.dumps({"time": round(time.time(), 3), **line}))
