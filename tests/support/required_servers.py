"""Servers of other projects that tests start, and what a test does where one cannot be had.

It is skipped, unless TORCHEMBED_REQUIRED_SERVERS names the server: then it fails, so that a run
which exists to exercise the server cannot pass without it.
"""

import os
from typing import NoReturn

import pytest

SERVERS = ("redis", "triton")


def required_servers() -> frozenset[str]:
    """The servers that TORCHEMBED_REQUIRED_SERVERS names, with commas between them."""
    text = os.environ.get("TORCHEMBED_REQUIRED_SERVERS", "")
    named = frozenset(name.strip() for name in text.split(",")) - {""}
    unknown = sorted(named - set(SERVERS))
    if unknown:
        raise ValueError(
            f"TORCHEMBED_REQUIRED_SERVERS must name servers among {', '.join(SERVERS)}, got "
            f"{', '.join(unknown)}"
        )
    return named


def without_server(server: str, reason: str) -> NoReturn:
    """Skip the test for want of a server, or fail it where the server is required.

    Args:
        reason: what the test needs, beginning with a verb.
    """
    assert server in SERVERS
    if server in required_servers():
        pytest.fail(
            f"TORCHEMBED_REQUIRED_SERVERS names {server}, and the test {reason}", pytrace=False
        )
    pytest.skip(reason)
