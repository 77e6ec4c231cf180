"""Connections over HTTP whose clients may neither send without end nor keep the server waiting."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from torchembed.serving.protocols.options import ClientTimeouts, RequestLimits


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits on header fields and connections and with time-outs.

    uvicorn itself waits for ever for the first byte, for the end of a request, and for a client
    that does not read.
    """

    limits: RequestLimits
    timeouts: ClientTimeouts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._refusal = (400, "the request is not HTTP/1.1")
        self._num_header_bytes = 0
        self._num_pending_bytes = 0
        self._has_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
            return
        self._wait_idly()

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        self.resume_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _wait_idly(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # close() would wait for the client to read
        else:
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        # What the parser holds back, a header field without end say, no callback has seen yet.
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self._num_pending_bytes > self.limits.max_header_bytes + len(data):
            self.transport.abort()
        elif self._receiving is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_idly()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_pending_bytes = 0
        self._has_headers = False
        self._received()
        self._receiving = self.loop.call_later(self.timeouts.receive_seconds, self._too_slow)

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if not self._has_headers:  # trailers of a body are for nobody
            super().on_header(name, value)

    def _count_header(self, num_bytes: int) -> None:
        self._num_pending_bytes = 0
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.limits.max_header_bytes:
            self._refusal = (
                431,
                f"line and header fields must have at most {self.limits.max_header_bytes} bytes",
            )
            raise ValueError(self._refusal[1])

    def on_headers_complete(self) -> None:
        self._num_pending_bytes = 0
        self._has_headers = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received()
        super().on_message_complete()

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _too_slow(self) -> None:
        self._receiving = None
        if self.pipeline:  # it waits behind another one, which is not the client's doing
            self._receiving = self.loop.call_later(self.timeouts.receive_seconds, self._too_slow)
            return
        self._refusal = (408, f"the request did not end in {self.timeouts.receive_seconds} s")
        if self._has_headers:
            self.transport.abort()
        else:
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        status, error = self._refusal
        body = json.dumps({"error": error}).encode()
        self.transport.write(
            STATUS_LINE[status] + b"content-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(self.timeouts.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
