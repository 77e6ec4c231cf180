"""Redis servers that tests of stores share, empty before each, and bounded stores of both kinds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.bounded_stores import BoundedStore
from tests.support.redis_servers import RedisServer, redis_cluster, redis_server
from torchembed.stores import RedisOptions, RedisStore, VolatileMemoryStore, VolatileOptions


@pytest.fixture(scope="session")
def _redis_of_session() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def _cluster_of_session() -> Iterator[list[RedisServer]]:
    with redis_cluster() as servers:
        yield servers


@pytest.fixture
def single_redis(_redis_of_session: RedisServer) -> RedisServer:
    with _redis_of_session.client() as client:
        client.flushall()
    return _redis_of_session


@pytest.fixture
def cluster(_cluster_of_session: list[RedisServer]) -> list[RedisServer]:
    for server in _cluster_of_session:
        with server.client() as client:
            client.flushall()
    return _cluster_of_session


@pytest.fixture(params=["memory", "redis"])
def open_bounded(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[VolatileOptions], BoundedStore]]:
    """Opens a bounded store, which is closed after the test; those in Redis share one server."""
    with ExitStack() as stack:
        if request.param == "memory":
            yield lambda options: stack.enter_context(VolatileMemoryStore(options))
        else:
            address = RedisOptions(addresses=(request.getfixturevalue("single_redis").address,))
            yield lambda options: stack.enter_context(RedisStore(address, options))
