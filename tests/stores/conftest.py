"""Redis servers that tests of stores share, empty before each."""

from collections.abc import Iterator

import pytest

from tests.support.redis_servers import RedisServer, redis_server


@pytest.fixture(scope="session")
def _redis_of_session() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def single_redis(_redis_of_session: RedisServer) -> RedisServer:
    with _redis_of_session.client() as client:
        client.flushall()
    return _redis_of_session
