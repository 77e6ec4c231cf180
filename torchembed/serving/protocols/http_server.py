"""The server of the Open Inference Protocol over HTTP."""

import math
import socket
import threading

import uvicorn

from torchembed.serving.interface import ModelDirectory
from torchembed.serving.protocols.admission import Admission
from torchembed.serving.protocols.http_connection import BoundedConnection
from torchembed.serving.protocols.http_routes import HttpRoutes
from torchembed.serving.protocols.metrics import ServerMetrics
from torchembed.serving.protocols.options import ServerOptions


class HttpServer:
    """Answers for the models of a directory over HTTP, from a thread of its own.

    Args:
        directory: the models.
        options: how to listen.
        metrics: where to count; several servers may share them. Shown at ``/metrics``.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        options: ServerOptions | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self._options = options or ServerOptions()
        self._admission = Admission(self._options.limits)
        self._routes = HttpRoutes(
            directory, metrics or ServerMetrics(), self._admission, self._options
        )
        self._address = ""
        self._server: _AnnouncedServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """``host:port`` that it listens at, as clients have it.

        Raises:
            RuntimeError: before :meth:`start`.
        """
        if self._server is None:
            raise RuntimeError("an HttpServer has an address once it is started")
        return self._address

    def start(self) -> None:
        """Listen, and return once connections are taken.

        Raises:
            OSError: where the address cannot be listened at.
            RuntimeError: where it was started before.
        """
        if self._server is not None:
            raise RuntimeError("an HttpServer is started once; make another one")
        options = self._options
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
        host, port = listener.getsockname()[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self._server = _AnnouncedServer(self._config())
        except BaseException:
            listener.close()
            raise
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="torchembed-http-server", daemon=True
        )
        self._thread.start()
        self._server.announced.wait()

    def _config(self) -> uvicorn.Config:
        class Connection(BoundedConnection):
            limits = self._options.limits
            timeouts = self._options.timeouts

        tls = self._options.tls
        config = uvicorn.Config(
            self._routes.app,
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(self._options.timeouts.idle_seconds),
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        config.load()  # certificates that are none are refused here, not in the thread
        return config

    def refuse_new(self) -> None:
        """Be ready no more and refuse new requests; those under way go on."""
        self._admission.close()

    def stop(self, grace_seconds: float = 30.0) -> None:
        """Refuse new requests, end those under way, in at most ``grace_seconds``, and return."""
        self.refuse_new()
        if self._server is not None and self._thread is not None:
            self._server.config.timeout_graceful_shutdown = math.ceil(grace_seconds)
            self._server.should_exit = True
            self._thread.join()
        self._routes.close()


class _AnnouncedServer(uvicorn.Server):
    """uvicorn's server, which says when it takes connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.announced = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.announced.set()
