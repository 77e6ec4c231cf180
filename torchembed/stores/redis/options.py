"""Options of stores in Redis."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from torchembed.core.addresses import parse_address
from torchembed.stores.arguments import check_positive

DEFAULT_PORT = 6379


class RedisLayout(enum.Enum):
    """Layouts of tables in Redis."""

    TORCHEMBED = "torchembed"
    """As :class:`~torchembed.stores.RedisStore` writes them."""
    HUGECTR = "hugectr"
    """As HugeCTR's parameter server writes them: the table ``<model>/<table>`` is its
    ``hps_et.<model>.<table>``. Its keys have 8 bytes. They are read, and not written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedisTls:
    """Encryption of connections to Redis.

    Args:
        ca_certificate: file, or folder of files, of the authorities that servers' certificates
            must be signed by; None: those that the system trusts.
        client_certificate: file of the certificate that this process shows; None: none.
        client_key: file of its private key.
        checks_host_name: whether the server's certificate must be made out to its address.
        server_name: the name that servers are asked by, and that their certificates must be made
            out to, in place of their addresses.
    """

    ca_certificate: Path | str | None = None
    client_certificate: Path | str | None = None
    client_key: Path | str | None = None
    checks_host_name: bool = True
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca_certificate", "client_certificate", "client_key"):
            path = getattr(self, name)
            if path is not None and not Path(path).exists():
                raise ValueError(f"{name} must be a file that exists, got {str(path)!r}")
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key must be given together")
        if self.server_name is not None and (not self.server_name or not self.checks_host_name):
            raise ValueError(
                "server_name must be a name, and checks_host_name be True beside it, got "
                f"{self.server_name!r} and {self.checks_host_name}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedisOptions:
    """The addresses of the Redis of a :class:`~torchembed.stores.RedisStore`, and its use.

    Args:
        addresses: ``host:port``, or ``host`` for port 6379. Of a cluster some of its nodes, which
            name the others; one address otherwise.
        is_cluster: whether it is a cluster.
        user_name: the user to log in as; None: the default one.
        password: None: no login.
        tls: None: connections are not encrypted.
        num_connections: most connections to each server.
        timeout_seconds: how long a connection, a reply, and a free connection are each waited for.
        layout: how tables lie in it.
        is_read_only: whether it is only read: nothing is written, access times and counts neither.
    """

    addresses: tuple[str, ...] = (f"127.0.0.1:{DEFAULT_PORT}",)
    is_cluster: bool = False
    user_name: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    tls: RedisTls | None = None
    num_connections: int = 5
    timeout_seconds: float = 2.0
    layout: RedisLayout = RedisLayout.TORCHEMBED
    is_read_only: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.addresses, tuple) or not self.addresses:
            raise ValueError(
                f"addresses must be a tuple of one address or more, got {self.addresses!r}"
            )
        for address in self.addresses:
            parse_address("addresses", address, default_port=DEFAULT_PORT)
        if len(self.addresses) > 1 and not self.is_cluster:
            raise ValueError(
                f"addresses must be one address where is_cluster is False, got {self.addresses!r}"
            )
        if self.user_name is not None and self.password is None:
            raise ValueError(f"user_name {self.user_name!r} needs a password; give it, too")
        check_positive("num_connections", self.num_connections)
        if not 0 < self.timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")
        if not isinstance(self.layout, RedisLayout):
            raise TypeError(f"layout must be a RedisLayout, got {self.layout!r}")
        if self.layout is RedisLayout.HUGECTR and not self.is_read_only:
            raise ValueError("layout HUGECTR is only read; set is_read_only=True")

    @staticmethod
    def from_url(url: str) -> "RedisOptions":
        """The options that ``redis://[[user]:password@]host[:port]`` stands for, or ``rediss://``
        for encrypted connections; ``dataclasses.replace`` changes others.

        Several ``host:port`` with commas between them are nodes of a cluster. The files of
        :class:`RedisTls` are parameters of ``rediss://`` with redis-py's names:
        ``rediss://a,b?ssl_ca_certs=ca.pem&ssl_certfile=own.pem&ssl_keyfile=own.key``.

        Raises:
            ValueError: for another URL, and for files that do not exist.
        """
        found = _URL.fullmatch(url)
        if found is None:
            scheme, separator, rest = url.partition("://")
            shown = scheme + separator + rest.rpartition("@")[2] if separator else "no scheme"
            raise ValueError(
                "url must be redis://[[user]:password@]host[:port][,host[:port]...] or "
                f"rediss://..., without a number of a database, got {shown} (the login is left out)"
            )
        files = _tls_files(found["query"])
        is_encrypted = found["scheme"] == "rediss"
        if files and not is_encrypted:
            raise ValueError(
                f"url must be rediss://... to have {', '.join(files)}, got redis://..."
            )
        addresses = tuple(
            _joined(*parse_address("url", address, default_port=DEFAULT_PORT))
            for address in found["hosts"].split(",")
        )
        return RedisOptions(
            addresses=addresses,
            is_cluster=len(addresses) > 1,
            user_name=unquote(found["user"]) if found["user"] else None,
            password=unquote(found["password"]) if found["password"] else None,
            tls=_tls(files) if is_encrypted else None,
        )


_URL = re.compile(
    r"(?P<scheme>rediss?)://(?:(?P<user>[^:@/?]*)(?::(?P<password>[^/?]*))?@)?"
    r"(?P<hosts>[^@/?]+)/?0?(?:\?(?P<query>.*))?"
)
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def _tls_files(query: str | None) -> dict[str, str]:
    """The files that the parameters of a URL name, by their names there.

    Raises:
        ValueError: for other parameters, and for one without a value or that comes twice.
    """
    files: dict[str, str] = {}
    for name, value in parse_qsl(query or "", keep_blank_values=True):
        if name not in _TLS_FILES or name in files or not value:
            raise ValueError(
                f"parameters of url must be among {', '.join(_TLS_FILES)}, each once and with a "
                f"file, got {name}"
            )
        files[name] = value
    return files


def _tls(files: Mapping[str, str]) -> RedisTls:
    ca, certificate, key = map(files.get, _TLS_FILES)
    return RedisTls(ca_certificate=ca, client_certificate=certificate, client_key=key)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
