"""The paths of the Open Inference Protocol, of Triton's extensions to it, and of metrics."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.routing import Route, Router

from torchembed.serving.interface import InvalidRequestError, ModelDirectory, UnknownModelError
from torchembed.serving.protocols import descriptions, repository
from torchembed.serving.protocols.admission import Admission
from torchembed.serving.protocols.http_answers import written_answer
from torchembed.serving.protocols.http_endpoint import Call, Endpoint, Reply, json_reply
from torchembed.serving.protocols.http_requests import json_object, read_inference
from torchembed.serving.protocols.inference import infer
from torchembed.serving.protocols.metrics import ServerMetrics
from torchembed.serving.protocols.options import ServerOptions

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"


class HttpRoutes:
    """Answers each path from a model directory, in threads where that may take time."""

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
        self._inferring = ThreadPoolExecutor(options.num_threads, "torchembed-http")
        # Loads take long, and what is said of models may not wait for them nor for inferences.
        self._loading = ThreadPoolExecutor(2, "torchembed-http-load")
        self._describing = ThreadPoolExecutor(2, "torchembed-http-describe")
        self.app = self._router()

    def close(self) -> None:
        """Begin nothing more in threads; what runs there goes on."""
        for pool in (self._inferring, self._loading, self._describing):
            pool.shutdown(wait=False, cancel_futures=True)

    def _router(self) -> Router:
        described = self._described
        models = [
            ("POST", "/infer", self._infer),
            ("GET", "", described(descriptions.model_metadata)),
            ("GET", "/ready", self._model_ready),
            ("GET", "/config", described(descriptions.model_config)),
            ("GET", "/stats", described(self._statistics)),
        ]
        routes = [
            self._route(method, prefix + suffix, answer)
            for method, suffix, answer in models
            for prefix in (_MODEL, _VERSION)
        ]
        routes += [
            self._route("GET", "/v2/health/live", self._live, is_health=True),
            self._route("GET", "/v2/health/ready", self._ready, is_health=True),
            self._route("GET", "/v2", self._server_metadata),
            self._route("POST", "/v2/repository/index", self._index),
            self._route("POST", "/v2/repository/models/{model}/load", self._load),
            self._route("POST", "/v2/repository/models/{model}/unload", self._unload),
            self._route("GET", "/metrics", self._metrics_text),
        ]
        # Before the model of that name, which could not be asked by another path.
        routes.insert(0, self._route("GET", "/v2/models/stats", described(self._statistics)))
        return Router(
            routes, redirect_slashes=False, default=self._endpoint("GET", self._unknown_path)
        )

    def _route(
        self,
        method: str,
        path: str,
        answer: Callable[[Call], Awaitable[Reply]],
        *,
        is_health: bool = False,
    ) -> Route:
        return Route(path, self._endpoint(method, answer, is_health=is_health))

    def _endpoint(
        self, method: str, answer: Callable[[Call], Awaitable[Reply]], *, is_health: bool = False
    ) -> Endpoint:
        return Endpoint(
            method=method,
            answer=answer,
            admission=self._admission,
            metrics=self._metrics,
            limits=self._options.limits,
            token=None if is_health else self._options.token,
            always_enters=is_health,
        )

    async def _infer(self, call: Call) -> Reply:
        json_length = _json_length(call)
        body = await call.body()
        limits = self._options.limits
        model = call.scope["path_params"]["model"]
        written, inferred = await asyncio.get_running_loop().run_in_executor(
            self._inferring,
            functools.partial(
                infer,
                self._directory,
                self._metrics,
                model,
                call.parameter("version"),
                arrived=time.perf_counter(),
                read=lambda: read_inference(body, json_length, limits),
                write=functools.partial(written_answer, model),
            ),
        )
        if written.json_length is None:
            return Reply(200, written.body, inferred=inferred)
        headers = (
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % written.json_length),
        )
        return Reply(200, written.body, headers, inferred)

    def _described(
        self, describe: Callable[[ModelDirectory, Any, str | None], dict[str, Any]]
    ) -> Callable[[Call], Awaitable[Reply]]:
        async def answer(call: Call) -> Reply:
            return await asyncio.get_running_loop().run_in_executor(
                self._describing,
                lambda: json_reply(
                    describe(self._directory, call.parameter("model"), call.parameter("version"))
                ),
            )

        return answer

    def _statistics(
        self, directory: ModelDirectory, name: str | None, version: str | None
    ) -> dict[str, Any]:
        return descriptions.statistics(directory, self._metrics.totals(), name, version)

    async def _model_ready(self, call: Call) -> Reply:
        def answer() -> Reply:
            self._directory.model(call.scope["path_params"]["model"], call.parameter("version"))
            return Reply(200, b"")

        return await asyncio.get_running_loop().run_in_executor(self._describing, answer)

    async def _live(self, call: Call) -> Reply:
        return Reply(200, b"")

    async def _ready(self, call: Call) -> Reply:
        if self._admission.is_closed:
            return json_reply({"error": "the server is about to end"}, 503)
        if not self._directory.is_ready:
            return json_reply({"error": "not all models are loaded yet"}, 503)
        return Reply(200, b"")

    async def _server_metadata(self, call: Call) -> Reply:
        return json_reply(descriptions.server_metadata())

    async def _metrics_text(self, call: Call) -> Reply:
        accept = call.headers.get(b"accept", b"").decode("latin-1")
        body, content_type = await asyncio.get_running_loop().run_in_executor(
            self._describing, self._metrics.text, accept
        )
        return Reply(200, body, ((b"content-type", content_type.encode()),))

    async def _index(self, call: Call) -> Reply:
        request = json_object(memoryview(await call.body()), self._options.limits)
        ready_only = request.get("ready", False)
        if type(ready_only) is not bool:
            raise InvalidRequestError("ready must be true or false")
        return await asyncio.get_running_loop().run_in_executor(
            self._describing,
            lambda: json_reply(descriptions.repository_index(self._directory, ready_only)),
        )

    async def _load(self, call: Call) -> Reply:
        return await self._repository(call, repository.load)

    async def _unload(self, call: Call) -> Reply:
        return await self._repository(call, repository.unload)

    async def _repository(
        self, call: Call, change: Callable[[ModelDirectory, str, dict[str, Any]], None]
    ) -> Reply:
        request = json_object(memoryview(await call.body()), self._options.limits)
        parameters = request.get("parameters")
        if parameters is None:
            parameters = {}
        if type(parameters) is not dict:
            raise InvalidRequestError("parameters must be an object")
        await asyncio.get_running_loop().run_in_executor(
            self._loading,
            change,
            self._directory,
            call.scope["path_params"]["model"],
            parameters,
        )
        return Reply(200, b"")

    async def _unknown_path(self, call: Call) -> Reply:
        raise UnknownModelError(f"there is nothing at {call.scope['path'][:200]!r}")


def _json_length(call: Call) -> int | None:
    text = call.headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise InvalidRequestError("Inference-Header-Content-Length must be a number of bytes")
    return int(text)
