"""Flags of a server, and the configuration that they give."""

from pathlib import Path
from typing import Any

from torchembed.serving.__main__ import make_parser
from torchembed.serving.configuration import RedisTlsConfig, VolatileConfig, VolatileKind
from torchembed.serving.server import config_of


def volatile(*flags: str) -> VolatileConfig | None:
    given = make_parser().parse_args(["--models", "m", *flags])
    return config_of(given, given.models).volatile


def test_redis_is_a_server_or_a_cluster(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("h", {"addresses": ("h:6379",)}),
        ("redis://:p@h:1", {"addresses": ("h:1",), "password": "p"}),
        ("h:1,i:2", {"addresses": ("h:1", "i:2"), "is_cluster": True}),
        (
            f"rediss://u:p@h,i?ssl_ca_certs={ca}",
            {
                "addresses": ("h:6379", "i:6379"),
                "is_cluster": True,
                "user_name": "u",
                "password": "p",
                "tls": RedisTlsConfig(ca_certificate=ca),
            },
        ),
        ("rediss://h", {"addresses": ("h:6379",), "tls": RedisTlsConfig()}),
    )
    for text, expected in cases:
        wanted = VolatileConfig(kind=VolatileKind.REDIS, **expected)
        assert volatile("--redis", text) == wanted
