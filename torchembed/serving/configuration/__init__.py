"""Configurations of servers: frozen dataclasses, and the files that they come from."""

from torchembed.core.addresses import Address, parse_address
from torchembed.serving.configuration.cache_config import CacheConfig
from torchembed.serving.configuration.choices import RowsOf, VolatileKind
from torchembed.serving.configuration.files import read_config, to_yaml
from torchembed.serving.configuration.hugectr_file import (
    HugectrConfig,
    is_hugectr,
    read_hugectr_config,
)
from torchembed.serving.configuration.level_configs import (
    PersistentConfig,
    RedisTlsConfig,
    UpdateConfig,
    VolatileConfig,
)
from torchembed.serving.configuration.model_config import (
    BatchingConfig,
    HugectrRows,
    ModelConfig,
)
from torchembed.serving.configuration.server_config import ServerConfig

__all__ = [
    "Address",
    "BatchingConfig",
    "CacheConfig",
    "HugectrConfig",
    "HugectrRows",
    "ModelConfig",
    "PersistentConfig",
    "RedisTlsConfig",
    "RowsOf",
    "ServerConfig",
    "UpdateConfig",
    "VolatileConfig",
    "VolatileKind",
    "is_hugectr",
    "parse_address",
    "read_config",
    "read_hugectr_config",
    "to_yaml",
]
