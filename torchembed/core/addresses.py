"""Addresses of servers, as users write them."""

import re
from typing import NamedTuple

_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]/@]+))(?::(?P<port>\d{1,5}))?"
)


class Address(NamedTuple):
    """The host and the port of a server."""

    host: str
    port: int


def parse_address(name: str, text: str, *, default_port: int | None = None) -> Address:
    """The address ``host:port``, or ``[host]:port`` where the host has colons.

    Args:
        name: of the argument, with which errors begin.
        default_port: of an address without one; None where each must have one.

    Raises:
        ValueError: for another text.
    """
    found = _ADDRESS.fullmatch(text)
    port = None if found is None else found["port"] or default_port
    if found is None or port is None or int(port) > 65535:
        raise ValueError(f"{name} must be host:port, such as 127.0.0.1:8000, got {text!r}")
    return Address(found["v6"] or found["host"], int(port))
