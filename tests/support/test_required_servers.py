"""Tests without their server are skipped, and fail where a run requires the server."""

import pytest

from tests.support.redis_servers import needs_redis
from tests.support.required_servers import required_servers, without_server

REQUIRED = "TORCHEMBED_REQUIRED_SERVERS"


@pytest.mark.parametrize("others", [None, "", "triton"])
def test_a_test_without_redis_is_skipped(
    others: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(REQUIRED, raising=False)
    if others is not None:
        monkeypatch.setenv(REQUIRED, others)
    with pytest.raises(pytest.skip.Exception, match=r"^needs redis-server: apt-get install"):
        needs_redis()


def test_a_test_without_a_required_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv(REQUIRED, "redis,triton")
    with pytest.raises(pytest.fail.Exception, match=f"^{REQUIRED} names redis, and the test needs"):
        needs_redis()
    with pytest.raises(pytest.fail.Exception, match=f"^{REQUIRED} names triton, and the test x$"):
        without_server("triton", "x")


def test_names_of_other_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "redis, kafka,")
    wanted = f"{REQUIRED} must name servers among redis, triton, got kafka"
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        required_servers()
