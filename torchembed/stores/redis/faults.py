"""Errors of Redis, as the stores' own."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

from torchembed.stores.errors import (
    RowStoreError,
    StoreAccessError,
    StoreFullError,
    StoreUnavailableError,
)


def import_redis() -> ModuleType:
    """The package redis, and its parts that are used here.

    Raises:
        ImportError: with what to install, where it is missing.
    """
    try:
        import redis.backoff
        import redis.connection
        import redis.crc
        import redis.retry
    except ImportError as error:
        raise ImportError(
            "RedisStore needs the packages redis and hiredis; pip install 'torchembed[serving]'"
        ) from error
    return redis


@contextlib.contextmanager
def faults_named(where: str) -> Iterator[None]:
    """Raise errors of the package redis in the block as those of stores; ``where`` is the server.

    Raises:
        StoreAccessError: for a wrong login or a missing right.
        StoreFullError: where the server is full.
        StoreUnavailableError: where it is away, or too busy to answer.
        RowStoreError: for everything else that it refuses.
    """
    redis = import_redis()
    errors = redis.exceptions
    try:
        yield
    except (
        errors.AuthenticationError,
        errors.AuthenticationWrongNumberOfArgsError,
        errors.AuthorizationError,
        errors.NoPermissionError,
    ) as error:
        raise StoreAccessError(
            f"the Redis at {where} refuses user_name and password, or their rights: {error}"
        ) from error
    except errors.OutOfMemoryError as error:
        raise StoreFullError(
            f"the Redis at {where} is full: {error} Raise its maxmemory, or lower "
            "overflow_margin_rows"
        ) from error
    except (
        errors.ConnectionError,
        errors.TimeoutError,
        errors.ClusterDownError,
        errors.ReadOnlyError,
        errors.TryAgainError,
        OSError,
    ) as error:
        raise StoreUnavailableError(f"the Redis at {where} does not answer: {error}") from error
    except errors.MovedError as error:
        raise RowStoreError(
            f"the Redis at {where} is a node of a cluster; set is_cluster=True"
        ) from error
    except errors.RedisError as error:
        raise RowStoreError(f"the Redis at {where} refuses a command: {error}") from error
