"""The configuration of a server."""

import dataclasses
from pathlib import Path
from typing import Annotated

from torchembed.core.addresses import parse_address
from torchembed.serving.configuration.fields import AtLeast, check_fields
from torchembed.serving.configuration.level_configs import (
    PersistentConfig,
    UpdateConfig,
    VolatileConfig,
)
from torchembed.serving.configuration.model_config import ModelConfig
from torchembed.serving.protocols import ClientTimeouts, RequestLimits, TlsFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All that a server is made of.

    Raises:
        ValueError: for values that cannot be; it begins with the field's name.
    """

    models_folder: Path
    """``<models_folder>/<model>/<version>`` holds what was deployed."""
    models: tuple[ModelConfig, ...] = ()
    """Those that are served; without any all of the folder, as ``ModelConfig`` has them by
    default."""
    http_address: str | None = "127.0.0.1:8000"
    """``host:port``, by port 0 any that is free; None for no HTTP."""
    grpc_address: str | None = "127.0.0.1:8001"
    """Likewise for gRPC."""
    num_threads: Annotated[int, AtLeast(1)] = 8
    """Requests of each protocol that are computed at once."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """What requests must carry, but for those for health."""
    tls: TlsFiles | None = None
    """Without it connections are open to read."""
    limits: RequestLimits = RequestLimits()
    timeouts: ClientTimeouts = ClientTimeouts()
    max_memory_bytes: Annotated[int, AtLeast(1)] | None = None
    """That rows and dense parts of loaded versions may take: a version that needs more than is left
    is refused before it is loaded. None for no limit, as where rows are in a persistent level."""
    grace_seconds: Annotated[float, AtLeast(0)] = 10.0
    """For requests under way when the server is to end."""
    volatile: VolatileConfig | None = VolatileConfig()
    """None for no such level."""
    persistent: PersistentConfig | None = None
    """None for rows in the volatile level alone."""
    updates: UpdateConfig | None = None
    """None for none but what is loaded."""

    def __post_init__(self) -> None:
        check_fields(self)
        addresses = {"http_address": self.http_address, "grpc_address": self.grpc_address}
        for name, address in addresses.items():
            if address is not None:
                parse_address(name, address)
        if self.http_address is None and self.grpc_address is None:
            raise ValueError("http_address or grpc_address must be given, got neither")
        names = [model.name for model in self.models]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"models[{i}].name must not come twice, got {name!r} again")
        if self.volatile is None and self.persistent is None:
            raise ValueError("volatile or persistent must be given, where rows are, got neither")
        if self.volatile is not None and self.persistent is None:
            share = self.volatile.initial_share
            if share not in (0, 1):
                raise ValueError(
                    "volatile.initial_share must be 0 or 1 where no persistent level has the other "
                    f"rows, got {share}"
                )
        if (
            self.updates is not None
            and self.persistent is not None
            and self.persistent.is_read_only
        ):
            raise ValueError(
                "updates must be left out where persistent.is_read_only is true, since its rows "
                "do not change"
            )
