"""How a server listens, and how much it takes."""

from dataclasses import dataclass, field, fields
from pathlib import Path

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """How large a request may be; what is larger is refused before memory is taken for it.

    Raises:
        ValueError: for a limit below 1.
    """

    max_body_bytes: int = 64 * _MIB
    """The most bytes of a request's body; over gRPC 2 GiB at most. A gRPC message with ``contents``
    takes up to ten times that in memory."""
    max_json_bytes: int = 16 * _MIB
    """Of the JSON part of a body, which takes up to twenty times that in memory."""
    max_header_bytes: int = 16 << 10
    """Of a request's line and header fields, or of a gRPC call's metadata."""
    max_tensors: int = 1024
    """Inputs, and likewise outputs that are asked for by name."""
    max_elements: int = 1 << 26
    """Of one tensor."""
    max_requests_at_once: int = 1024
    """Under way, those included that wait for a thread."""
    max_bytes_at_once: int = 1024 * _MIB
    """The most bytes that the bodies of all requests under way have together. Over gRPC it also
    bounds the answers that clients have not read: beyond it no further answer is computed."""
    max_connections: int = 4096
    """Open at once over HTTP."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value < 1:
                raise ValueError(f"{limit.name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class ClientTimeouts:
    """How long a server waits for clients, in seconds.

    Raises:
        ValueError: for a time that is not positive.
    """

    idle_seconds: float = 75.0
    """Between requests of a connection, and before the first. Over gRPC one second at least, and 24
    days at most."""
    receive_seconds: float = 60.0
    """From the first byte of a request to its last; over gRPC from the call to its message."""
    send_seconds: float = 60.0
    """For a client over HTTP to read on, once what it leaves unread fills the buffers; over gRPC
    from the answer until it is read."""

    def __post_init__(self) -> None:
        for timeout in fields(self):
            value = getattr(self, timeout.name)
            if not value > 0:
                raise ValueError(f"{timeout.name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """A server's certificate, the chain to it included, and its private key: PEM files.

    Raises:
        ValueError: where one is not there.
    """

    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        for name, path in (("certificate", self.certificate), ("key", self.key)):
            if not Path(path).is_file():
                raise ValueError(f"tls {name} must be a PEM file, and {path} is none")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server listens.

    Raises:
        ValueError: for values that cannot be.
    """

    host: str = "127.0.0.1"
    """The address to listen at; other machines reach ``0.0.0.0`` or ``::``, all addresses."""
    port: int = 0
    """0 for any that is free: the server's ``address`` then says which."""
    num_threads: int = 8
    """Requests that are computed at once."""
    token: str | None = field(default=None, repr=False)
    """What all requests but those for health must carry as ``Authorization: Bearer <token>``."""
    tls: TlsFiles | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must be an address to listen at, got an empty one")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {self.num_threads}")
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable()):
            raise ValueError("token must be printable ASCII, as header fields carry it")
        if self.token is not None and (not self.token or " " in self.token):
            raise ValueError("token must have at least one character and no space")
