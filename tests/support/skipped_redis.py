"""Whether a run of tests has left out Redis, although it is there."""

import shutil
from collections.abc import Iterable


def were_all_skipped(passed: Iterable[str], skipped: Iterable[str]) -> bool:
    """Whether tests of Redis, which have it in their names, were skipped and none of them passed,
    although there is a server."""
    return (
        shutil.which("redis-server") is not None
        and any(map(_is_of_redis, skipped))
        and not any(map(_is_of_redis, passed))
    )


def _is_of_redis(name: str) -> bool:
    return "redis" in name.lower()
