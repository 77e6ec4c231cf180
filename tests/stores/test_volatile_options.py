"""Options of bounded stores and of connections to Redis, and what they refuse."""

import math
from fractions import Fraction
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchembed.stores import OverflowPolicy, RedisLayout, RedisOptions, RedisTls, VolatileOptions


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_partitions": 0}, ValueError, "num_partitions must be positive, got 0"),
        ({"num_partitions": True}, TypeError, "num_partitions must be an int, got True"),
        ({"overflow_margin_rows": 0}, ValueError, "overflow_margin_rows must be positive, got 0"),
        ({"overflow_policy": "lru"}, TypeError, "overflow_policy must be an OverflowPolicy, got"),
        ({"overflow_resolution_target": 1}, TypeError, "target must be a float, got 1"),
        ({"overflow_resolution_target": 1.0}, ValueError, "greater than 0 and less than 1, got 1"),
        ({"overflow_resolution_target": 0.0}, ValueError, "greater than 0 and less than 1, got 0"),
        ({"overflow_resolution_target": math.nan}, ValueError, "and less than 1, got nan"),
        ({"max_batch_rows": 262_144}, ValueError, "max_batch_rows must be at most 262143, got"),
        ({"max_batch_rows": -1}, ValueError, "max_batch_rows must be positive, got -1"),
    ],
)
def test_wrong_options_of_stores(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        VolatileOptions(**options)  # type: ignore[arg-type]


@given(st.integers(1, 10**12), st.integers(1, 999))
def test_the_rows_left_are_those_of_exact_numbers(margin: int, thousandths: int) -> None:
    options = VolatileOptions(
        overflow_margin_rows=margin, overflow_resolution_target=thousandths / 1000
    )
    assert options.num_rows_left == math.floor(margin * Fraction(thousandths, 1000))
    assert VolatileOptions().num_rows_left is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"addresses": ()}, ValueError, "addresses must be a tuple of one address or more, got"),
        ({"addresses": "host"}, ValueError, "addresses must be a tuple of one address or more"),
        ({"addresses": ("a:b",)}, ValueError, "addresses must be host:port, such as .*, got 'a:b'"),
        (
            {"addresses": ("u@a:1",)},
            ValueError,
            "addresses must be host:port, such as .*, got 'u@a:1'",
        ),
        ({"addresses": ("a:1", "b:2")}, ValueError, "must be one address where is_cluster is"),
        ({"user_name": "u"}, ValueError, "user_name 'u' needs a password; give it, too"),
        ({"num_connections": 0}, ValueError, "num_connections must be positive, got 0"),
        ({"timeout_seconds": 0.0}, ValueError, "timeout_seconds must be positive, got 0.0"),
        ({"timeout_seconds": math.inf}, ValueError, "timeout_seconds must be positive, got inf"),
        ({"layout": "hugectr"}, TypeError, "layout must be a RedisLayout, got 'hugectr'"),
        ({"layout": RedisLayout.HUGECTR}, ValueError, "only read; set is_read_only=True"),
    ],
)
def test_wrong_options_of_connections(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RedisOptions(**options)  # type: ignore[arg-type]


def test_files_of_certificates_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ca_certificate must be a file that exists, got"):
        RedisTls(ca_certificate=tmp_path / "none")
    with pytest.raises(ValueError, match="client_certificate and client_key must be given toget"):
        RedisTls(client_key=tmp_path)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", {"addresses": ("host:6379",)}),
        ("redis://:p%40ss@host:1/0", {"addresses": ("host:1",), "password": "p@ss"}),
        ("rediss://u:p@[::1]:7", {"addresses": ("[::1]:7",), "user_name": "u", "password": "p"}),
    ],
)
def test_urls(url: str, expected: dict[str, object]) -> None:
    options = RedisOptions.from_url(url)
    assert {name: getattr(options, name) for name in expected} == expected
    assert (options.tls is not None) == url.startswith("rediss")


def test_urls_of_clusters_and_files(tmp_path: Path) -> None:
    options = RedisOptions.from_url("redis://:p@a:1,b,[::1]:3")
    assert options.addresses == ("a:1", "b:6379", "[::1]:3")
    assert options.is_cluster and options.password == "p" and options.tls is None
    assert not RedisOptions.from_url("redis://a").is_cluster
    ca, own, key = (tmp_path / name for name in ("ca 1.pem", "own.pem", "own.key"))
    for file in (ca, own, key):
        file.touch()
    files = {"ssl_ca_certs": ca, "ssl_certfile": own, "ssl_keyfile": key}
    options = RedisOptions.from_url(f"rediss://a,b?{urlencode(files)}")
    assert options.tls == RedisTls(
        ca_certificate=str(ca), client_certificate=str(own), client_key=str(key)
    )
    assert options.is_cluster
    for url, message in (
        ("rediss://a?ssl_ca_certs=absent.pem", "ca_certificate must be a file that exists"),
        (f"rediss://a?ssl_certfile={own}", "client_certificate and client_key must be given toge"),
        (f"redis://a?ssl_certfile={own}", "url must be rediss://... to have ssl_certfile"),
        ("rediss://a?db=3", "parameters of url must be among ssl_ca_certs, .*, got db$"),
        ("rediss://a?ssl_ca_certs=", "each once and with a file, got ssl_ca_certs$"),
        ("rediss://a?ssl_keyfile=x&ssl_keyfile=y", "each once and with a file, got ssl_keyfile$"),
        ("redis://a,", "url must"),
        ("redis://a:b", "url must"),
    ):
        with pytest.raises(ValueError, match=message):
            RedisOptions.from_url(url)


@pytest.mark.parametrize("url", ["http://host", "redis://", "redis://host/3", "host:1"])
def test_urls_of_something_else(url: str) -> None:
    with pytest.raises(ValueError, match=r"url must be redis://\[\[user\]:password@\]host\[:port"):
        RedisOptions.from_url(url)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(RedisOptions(password="secret"))
    with pytest.raises(ValueError, match="url must be redis") as raised:
        RedisOptions.from_url("redis://user:secret@host/3")
    assert "secret" not in str(raised.value)


def test_policies_without_reads_note_none() -> None:
    assert not VolatileOptions(overflow_margin_rows=5).notes_accesses
    assert not VolatileOptions(overflow_policy=OverflowPolicy.EVICT_OLDEST).notes_accesses
    assert VolatileOptions(
        overflow_margin_rows=5, overflow_policy=OverflowPolicy.EVICT_OLDEST
    ).notes_accesses
