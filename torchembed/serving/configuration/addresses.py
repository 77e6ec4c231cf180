"""Addresses of servers, as configurations have them."""

import re
from typing import NamedTuple

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})")


class Address(NamedTuple):
    """The host and the port of a server."""

    host: str
    port: int


def parse_address(name: str, text: str) -> Address:
    """The address ``host:port``, or ``[host]:port`` where the host has colons.

    Raises:
        ValueError: for another text; it begins with ``name``.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{name} must be host:port, such as 127.0.0.1:8000, got {text!r}")
    return Address(found["v6"] or found["host"], int(found["port"]))


def check_address(name: str, text: str) -> None:
    """Raise ``ValueError`` unless ``text`` is an address; it begins with ``name``."""
    parse_address(name, text)
