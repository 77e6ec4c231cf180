"""What every request over HTTP goes through: its token, its body, its errors and the access log."""

import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from torchembed.serving.interface import (
    BusyError,
    InvalidRequestError,
    ModelNotReadyError,
    UnknownModelError,
)
from torchembed.serving.protocols import access_log
from torchembed.serving.protocols.admission import Admission
from torchembed.serving.protocols.inference import Inferred
from torchembed.serving.protocols.metrics import ServerMetrics
from torchembed.serving.protocols.options import RequestLimits
from torchembed.serving.protocols.refusals import (
    EncodedBodyError,
    TooLargeError,
    UnauthorizedError,
    UnsupportedError,
    shortened,
)

_logger = logging.getLogger("torchembed.serving")

# The first that fits counts.
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (TooLargeError, 413),
    (InvalidRequestError, 400),
    (UnknownModelError, 404),
    (UnauthorizedError, 401),
    (EncodedBodyError, 415),
    (UnsupportedError, 501),
    (ModelNotReadyError, 503),
    (BusyError, 503),
)


class Reply(NamedTuple):
    """A status, a body and what it is."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    inferred: Inferred | None = None


def json_reply(value: object, status: int = 200) -> Reply:
    """``value`` as JSON."""
    return Reply(status, json.dumps(value, separators=(",", ":")).encode())


class ClientGoneError(ConnectionError):
    """The client went before its request was there whole."""


@dataclass(kw_only=True, slots=True)
class Call:
    """A request as endpoints see it."""

    scope: Scope
    receive: Receive
    headers: dict[bytes, bytes]
    limits: RequestLimits
    admission: Admission
    num_body_bytes: int = 0

    def parameter(self, name: str) -> str | None:
        """What the path has at ``name``."""
        return self.scope["path_params"].get(name)

    async def body(self) -> bytearray:
        """The whole body.

        Raises:
            TooLargeError: above the limit, as soon as that is known.
            BusyError: where the server has too many bytes under way.
            ClientGoneError: where the client goes.
        """
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise EncodedBodyError("Content-Encoding is not supported; send the body as it is")
        announced = int(self.headers.get(b"content-length", b"0"))
        self._take(announced)
        body = bytearray()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client closed the connection")
            body += message["body"]
            if len(body) > self.num_body_bytes:
                self._take(len(body) - self.num_body_bytes)
            if not message["more_body"]:
                return body

    def _take(self, num_bytes: int) -> None:
        if self.num_body_bytes + num_bytes > self.limits.max_body_bytes:
            raise TooLargeError(f"a body must have at most {self.limits.max_body_bytes} bytes")
        self.admission.take(num_bytes)
        self.num_body_bytes += num_bytes


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An ASGI application that answers one method of one kind of path.

    Anything that ``answer`` raises becomes an answer with an ``error``.
    """

    method: str
    answer: Callable[[Call], Awaitable[Reply]]
    admission: Admission
    metrics: ServerMetrics
    limits: RequestLimits
    token: str | None = field(default=None, repr=False)
    always_enters: bool = False
    """Also while the server ends or is busy: for health."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        call = Call(
            scope=scope,
            receive=receive,
            headers=dict(scope["headers"]),
            limits=self.limits,
            admission=self.admission,
        )
        entered = False
        error = None
        try:
            self._check_token(call)
            if not self.always_enters:
                self.admission.enter()
                entered = True
                self.metrics.in_progress("http", 1)
            if scope["method"] not in (self.method, "HEAD" if self.method == "GET" else None):
                reply = json_reply({"error": f"this path is for {self.method} alone"}, 405)
            else:
                reply = await self.answer(call)
        except ClientGoneError:
            return
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is answered and logged
            error = raised
            reply = self._refusal(raised)
        finally:
            if entered:
                self.metrics.in_progress("http", -1)
                self.admission.leave(call.num_body_bytes)
        await _send(reply, send)
        self._log(call, reply, error, time.perf_counter() - began)

    def _check_token(self, call: Call) -> None:
        if self.token is None:
            return
        scheme, _, token = call.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token, self.token.encode()):
            raise UnauthorizedError(
                "the request must carry the token: Authorization: Bearer <token>"
            )

    def _refusal(self, error: Exception) -> Reply:
        for kind, status in _STATUSES:
            if isinstance(error, kind):
                self.metrics.refused("http", kind.__name__.removesuffix("Error"))
                reply = json_reply({"error": shortened(error)}, status)
                if status == 401:
                    return reply._replace(
                        headers=(*reply.headers, (b"www-authenticate", b"Bearer"))
                    )
                return reply
        self.metrics.refused("http", "Failure")
        _logger.error("a request over HTTP failed", exc_info=error)
        return json_reply({"error": "the server failed to answer; its log says why"}, 500)

    def _log(self, call: Call, reply: Reply, error: Exception | None, seconds: float) -> None:
        scope, inferred = call.scope, reply.inferred
        client: Any = scope.get("client")
        access_log.write(
            access_log.Access(
                protocol="http",
                call=f"{scope['method']} {scope['path']}",
                client=f"{client[0]}:{client[1]}" if client else "",
                status=reply.status,
                seconds=seconds,
                request_bytes=call.num_body_bytes,
                response_bytes=len(reply.body),
                model=inferred.model if inferred else None,
                version=inferred.version if inferred else None,
                num_default_rows=inferred.num_default_rows if inferred else None,
                error=None if error is None else shortened(error),
            )
        )


async def _send(reply: Reply, send: Send) -> None:
    length = (b"content-length", b"%d" % len(reply.body))
    await send(
        {
            "type": "http.response.start",
            "status": reply.status,
            "headers": [*reply.headers, length],
        }
    )
    await send({"type": "http.response.body", "body": reply.body})
