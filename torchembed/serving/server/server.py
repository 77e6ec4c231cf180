"""A server, assembled from its configuration."""

import contextlib
import socket
import uuid
from types import TracebackType
from typing import Self

from torchembed.core.random_bits import name_key
from torchembed.serving.configuration import (
    ModelConfig,
    ServerConfig,
    UpdateConfig,
    VolatileKind,
    parse_address,
)
from torchembed.serving.models import ModelRepository
from torchembed.serving.protocols import (
    GrpcServer,
    HttpServer,
    ServerMetrics,
    ServerOptions,
    serve_until_signalled,
)
from torchembed.serving.server.lookups import model_options
from torchembed.serving.server.memory_table import memory_table
from torchembed.serving.server.metrics import (
    batch_totals,
    eviction_totals,
    lookup_totals,
    update_totals,
)
from torchembed.serving.server.refreshing import Refresher
from torchembed.serving.server.stores import loads_rows, open_stores
from torchembed.serving.updates import ApplierOptions, UpdateApplier
from torchembed.stores import RedisStore, VolatileMemoryStore
from torchembed.streams import SourceOptions, UpdateSource


class Server:
    """The models of a folder behind the Open Inference Protocol, as a configuration says.

    It is a context manager that closes itself.

    Raises:
        ValueError: for settings that cannot be together, or are not there yet.
        RowStoreError, OSError: where a store cannot be opened.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.metrics = config, ServerMetrics()
        with contextlib.ExitStack() as opening:
            stores = open_stores(config, opening)
            chosen = {model.name: model_options(model, stores) for model in config.models}
            of_others = ModelConfig(name="others")
            self.repository = opening.enter_context(
                ModelRepository(
                    config.models_folder,
                    model_options(of_others, stores),
                    models=chosen or None,
                    records=stores.records,
                    is_loading=loads_rows(config),
                    max_bytes=config.max_memory_bytes,
                )
            )
            self._opened, self._records = opening.pop_all(), stores.records
        self.metrics.add_source(lambda: lookup_totals(self.repository))
        volatile, uppermost = config.volatile, stores.stores[0]
        if volatile is not None:
            assert isinstance(uppermost, VolatileMemoryStore | RedisStore)
            self.metrics.add_source(lambda: eviction_totals(volatile, uppermost))
        self.metrics.add_execution_source(lambda: batch_totals(self.repository))
        directory, metrics = self.repository, self.metrics
        self.http = self.grpc = None
        if config.http_address is not None:
            options = _options(config, config.http_address)
            self.http = HttpServer(directory, options=options, metrics=metrics)
        if config.grpc_address is not None:
            options = _options(config, config.grpc_address)
            self.grpc = GrpcServer(directory, options=options, metrics=metrics)
        self._protocols = [server for server in (self.http, self.grpc) if server is not None]
        self._is_started = False

    def start(self) -> None:
        """Listen, load all models, and be ready; updates are applied from then on.

        Raises:
            ValueError, UnknownModelError: where a model cannot be loaded, or all of them need more
                memory than there is.
            ConnectionError: where no broker answers.
            OSError: where an address cannot be listened at.
        """
        if self._is_started:
            raise RuntimeError("a Server is started once; make another one")
        self._is_started = True
        memory_table(self.config)  # refuses what does not fit, before anything is loaded
        # Before models, which may take long to load, so that health can be asked meanwhile.
        for server in self._protocols:
            server.start()
        self.repository.start()
        if self.config.updates is not None:
            self._opened.enter_context(self._applier(self.config.updates))
        for model in self.config.models:
            if model.cache.refresh_interval_seconds > 0:
                self._opened.enter_context(Refresher(self.repository, model.name, model.cache))

    def serve(self) -> int:
        """Serve until SIGTERM or SIGINT, end gracefully, and return the signal's number. Call it
        on the main thread."""
        number = serve_until_signalled(self._protocols, self.config.grace_seconds)
        self.close()
        return number

    def close(self) -> None:
        """End at once what was started; a second call does nothing."""
        for server in self._protocols:
            server.stop(0.0)
        self._protocols = []
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _applier(self, config: UpdateConfig) -> UpdateApplier:
        names = tuple(model.name for model in self.config.models) or None
        options = SourceOptions(
            models=names,
            max_messages=config.max_batch_messages,
            discovery_seconds=config.metadata_refresh_seconds,
            start_timeout_seconds=config.start_timeout_seconds,
            client_settings=config.client_settings,
            topic_filters=config.filters or SourceOptions.topic_filters,
        )
        source = UpdateSource(
            ",".join(config.brokers),
            config.group or _group(self.config),
            options,
            is_served=self.repository.is_served,
        )
        applying = ApplierOptions(
            poll_timeout_seconds=config.poll_timeout_seconds,
            back_off_seconds=config.failure_back_off_seconds,
            longest_back_off_seconds=max(
                config.failure_back_off_seconds, ApplierOptions.longest_back_off_seconds
            ),
        )
        applier = UpdateApplier(source, self.repository, applying, records=self._records)
        self.metrics.add_source(lambda: update_totals(applier))
        return applier


def _group(config: ServerConfig) -> str:
    """The group of servers whose rows are in the same stores as those of ``config``."""
    if config.persistent is not None:
        path = config.persistent.path.resolve()
        return f"torchembed-serving.{socket.gethostname()}.{name_key(0, str(path)):x}"
    if config.volatile is not None and config.volatile.kind is VolatileKind.REDIS:
        return "torchembed-serving"
    # These rows end with the process: what others have read, or it has read before, it reads again.
    return f"torchembed-serving.{uuid.uuid4()}"


def _options(config: ServerConfig, address: str) -> ServerOptions:
    host, port = parse_address("address", address)
    return ServerOptions(
        host=host,
        port=port,
        num_threads=config.num_threads,
        token=config.token,
        tls=config.tls,
        limits=config.limits,
        timeouts=config.timeouts,
    )
