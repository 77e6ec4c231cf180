"""The server of the Open Inference Protocol over gRPC."""

import math
from concurrent.futures import ThreadPoolExecutor

import grpc

from torchembed.serving.interface import ModelDirectory
from torchembed.serving.protocols.admission import Admission
from torchembed.serving.protocols.grpc_service import GrpcService
from torchembed.serving.protocols.metrics import ServerMetrics
from torchembed.serving.protocols.options import ServerOptions


class GrpcServer:
    """Answers for the models of a directory over gRPC, from threads of its own.

    Args:
        directory: the models.
        options: how to listen.
        metrics: where to count; several servers may share them.
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
        self._service = GrpcService(
            directory, metrics or ServerMetrics(), self._admission, self._options
        )
        # One for each call under way; the service bounds how many of them compute at once.
        self._threads = ThreadPoolExecutor(
            self._options.limits.max_requests_at_once, "torchembed-grpc"
        )
        self._server: grpc.Server | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """``host:port`` that it listens at, as clients have it.

        Raises:
            RuntimeError: before :meth:`start`.
        """
        if self._server is None:
            raise RuntimeError("a GrpcServer has an address once it is started")
        return self._address

    def start(self) -> None:
        """Listen, and return once calls are taken.

        Raises:
            OSError: where the address cannot be listened at.
            RuntimeError: where it was started before.
        """
        if self._server is not None:
            raise RuntimeError("a GrpcServer is started once; make another one")
        options, limits = self._options, self._options.limits
        server = grpc.server(
            self._threads,
            handlers=[self._service.handlers()],
            options=(
                ("grpc.max_receive_message_length", _int32(limits.max_body_bytes)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", _int32(limits.max_header_bytes)),
                ("grpc.absolute_max_metadata_size", _int32(limits.max_header_bytes)),
                (
                    "grpc.max_connection_idle_ms",
                    _int32(options.timeouts.idle_seconds * 1000),
                ),
                (
                    "grpc.server_handshake_timeout_ms",
                    _int32(options.timeouts.receive_seconds * 1000),
                ),
                ("grpc.so_reuseport", 0),
            ),
            maximum_concurrent_rpcs=limits.max_requests_at_once,
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        wanted = f"{host}:{options.port}"
        try:
            if options.tls is None:
                port = server.add_insecure_port(wanted)
            else:
                pair = (options.tls.key.read_bytes(), options.tls.certificate.read_bytes())
                port = server.add_secure_port(wanted, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen at {wanted}: {error}") from error
        self._service.waiting.start()
        server.start()
        self._server = server
        self._address = f"{host}:{port}"

    def refuse_new(self) -> None:
        """Be ready no more and refuse new calls; those under way go on."""
        self._admission.close()

    def stop(self, grace_seconds: float = 30.0) -> None:
        """Refuse new calls, end those under way, in at most ``grace_seconds``, and return."""
        self.refuse_new()
        if self._server is not None:
            self._server.stop(grace_seconds).wait()
        self._service.waiting.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _int32(limit: float) -> int:
    """``limit``, rounded up, or the most that gRPC's options can be."""
    return math.ceil(min(limit, 2**31 - 1))
