"""The calls of ``inference.GRPCInferenceService``."""

import functools
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf import json_format

from torchembed.serving.interface import (
    BusyError,
    InvalidRequestError,
    ModelDirectory,
    ModelNotReadyError,
    UnknownModelError,
)
from torchembed.serving.protocols import access_log, descriptions, grpc_requests, repository
from torchembed.serving.protocols.admission import Admission
from torchembed.serving.protocols.grpc_messages import message_class
from torchembed.serving.protocols.grpc_waiting import WaitingCalls
from torchembed.serving.protocols.inference import Inferred, infer
from torchembed.serving.protocols.metrics import ServerMetrics
from torchembed.serving.protocols.options import ServerOptions
from torchembed.serving.protocols.refusals import (
    TooLargeError,
    UnauthorizedError,
    UnsupportedError,
    shortened,
)

SERVICE = "inference.GRPCInferenceService"

_logger = logging.getLogger("torchembed.serving")

# The first that fits counts.
_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (TooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModelError, grpc.StatusCode.NOT_FOUND),
    (UnauthorizedError, grpc.StatusCode.UNAUTHENTICATED),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (ModelNotReadyError, grpc.StatusCode.UNAVAILABLE),
    (BusyError, grpc.StatusCode.UNAVAILABLE),
)


class GrpcService:
    """Answers each call from a model directory, on the thread that it comes on.

    Token and room are looked at before a message is received. ``options.num_threads`` inferences
    are computed at once; calls that wait for them, or for their message, have threads of their own.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        metrics: ServerMetrics,
        admission: Admission,
        options: ServerOptions,
    ) -> None:
        self._directory = directory
        self._metrics = metrics
        self._admission = admission
        self._options = options
        self._inferring = threading.BoundedSemaphore(options.num_threads)
        self.waiting = WaitingCalls(options.timeouts)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server calls."""
        calls: dict[str, Callable[[Any], bytes | tuple[bytes, Inferred]]] = {
            "ServerLive": lambda request: _written("ServerLiveResponse", {"live": True}),
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda request: _written(
                "ServerMetadataResponse", descriptions.server_metadata()
            ),
            "ModelMetadata": lambda request: _written(
                "ModelMetadataResponse",
                descriptions.model_metadata(self._directory, request.name, request.version or None),
            ),
            "ModelConfig": lambda request: _written(
                "ModelConfigResponse",
                {
                    "config": descriptions.model_config(
                        self._directory, request.name, request.version or None
                    )
                },
            ),
            "ModelStatistics": lambda request: _written(
                "ModelStatisticsResponse",
                descriptions.statistics(
                    self._directory,
                    self._metrics.totals(),
                    request.name or None,
                    request.version or None,
                ),
            ),
            "ModelInfer": self._infer,
            "RepositoryIndex": lambda request: _written(
                "RepositoryIndexResponse",
                {"models": descriptions.repository_index(self._directory, request.ready)},
            ),
            "RepositoryModelLoad": functools.partial(self._repository, repository.load),
            "RepositoryModelUnload": functools.partial(self._repository, repository.unload),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                # The same to clients, and the message is received when it is asked for.
                name: grpc.stream_unary_rpc_method_handler(
                    functools.partial(self._answered, name, answer)
                )
                for name, answer in calls.items()
            },
        )

    def _answered(
        self,
        name: str,
        answer: Callable[[Any], bytes | tuple[bytes, Inferred]],
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> bytes:
        """Handle what every call goes through: its token, its message, its errors and the access
        log."""
        began = time.perf_counter()
        is_health = name in ("ServerLive", "ServerReady")
        entered, num_bytes = False, 0
        data = b""
        inferred = error = None
        response = b""
        code = grpc.StatusCode.OK
        try:
            if not is_health:
                self._check_token(context)
                self._admission.enter()
                entered = True
                self._metrics.in_progress("grpc", 1)
            data = self._received(messages, context)
            if entered:
                self._admission.take(len(data))
                num_bytes = len(data)
            answered = answer(_read(f"{name}Request", data))
            response, inferred = answered if isinstance(answered, tuple) else (answered, None)
        except grpc.RpcError:  # the client went, or its message came too late
            code = grpc.StatusCode.CANCELLED
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is answered and logged
            error = raised
            code, details = self._refusal(raised)
            context.set_code(code)
            context.set_details(details)
        finally:
            if entered:
                self._metrics.in_progress("grpc", -1)
                self._admission.leave(num_bytes)
        access_log.write(
            access_log.Access(
                protocol="grpc",
                call=name,
                client=context.peer(),
                status=code.name,
                seconds=time.perf_counter() - began,
                request_bytes=len(data),
                response_bytes=len(response),
                model=inferred.model if inferred else None,
                version=inferred.version if inferred else None,
                num_default_rows=inferred.num_default_rows if inferred else None,
                error=None if error is None else shortened(error),
            )
        )
        num_kept = len(response)
        self._admission.keep_answer(num_kept)
        self.waiting.sending(context, lambda: self._admission.let_answer_go(num_kept))
        return response

    def _received(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self.waiting.receiving(context):
            for message in messages:
                return message
        raise InvalidRequestError("the call must have a message, got none")

    def _check_token(self, context: grpc.ServicerContext) -> None:
        token = self._options.token
        if token is None:
            return
        for name, value in context.invocation_metadata():
            scheme, _, given = value.partition(" ") if isinstance(value, str) else ("", "", "")
            if name == "authorization" and scheme.lower() == "bearer":
                if hmac.compare_digest(given.encode(), token.encode()):
                    return
                break
        raise UnauthorizedError("the call must carry the token: authorization: Bearer <token>")

    def _refusal(self, error: Exception) -> tuple[grpc.StatusCode, str]:
        for kind, code in _CODES:
            if isinstance(error, kind):
                self._metrics.refused("grpc", kind.__name__.removesuffix("Error"))
                return code, shortened(error)
        self._metrics.refused("grpc", "Failure")
        _logger.error("a call over gRPC failed", exc_info=error)
        return grpc.StatusCode.INTERNAL, "the server failed to answer; its log says why"

    def _server_ready(self, request: Any) -> bytes:
        ready = self._directory.is_ready and not self._admission.is_closed
        return _written("ServerReadyResponse", {"ready": ready})

    def _model_ready(self, request: Any) -> bytes:
        try:
            self._directory.model(request.name, request.version or None)
        except (UnknownModelError, ModelNotReadyError):
            return _written("ModelReadyResponse", {"ready": False})
        return _written("ModelReadyResponse", {"ready": True})

    def _infer(self, request: Any) -> tuple[bytes, Inferred]:
        arrived = time.perf_counter()
        with self._inferring:
            self._admission.check_room_for_answer()
            return infer(
                self._directory,
                self._metrics,
                request.model_name,
                request.model_version or None,
                arrived=arrived,
                read=lambda: grpc_requests.read_inference(request, self._options.limits),
                write=functools.partial(
                    grpc_requests.written_answer, request.id, request.model_name
                ),
            )

    def _repository(
        self, change: Callable[[ModelDirectory, str, dict[str, Any]], None], request: Any
    ) -> bytes:
        parameters = {
            name: next((value for _, value in parameter.ListFields()), None)
            for name, parameter in request.parameters.items()
        }
        change(self._directory, request.model_name, parameters)
        return b""


def _read(name: str, data: bytes) -> Any:
    try:
        return message_class(name).FromString(data)
    except Exception as error:  # protobuf's own classes of errors differ between its versions
        raise InvalidRequestError(f"the message is no {name}") from error


def _written(name: str, value: dict[str, Any]) -> bytes:
    return json_format.ParseDict(value, message_class(name)()).SerializeToString()
