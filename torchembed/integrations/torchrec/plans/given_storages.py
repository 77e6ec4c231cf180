"""Tables whose config, one of torchembed's for TorchRec, says where their rows live."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import cast

from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ParameterSharding

from torchembed.integrations.torchrec.configs import EmbeddingBagConfig, EmbeddingConfig
from torchembed.integrations.torchrec.plans.placements import check_placement
from torchembed.integrations.torchrec.plans.table_configs import table_configs
from torchembed.modules.configs import initializer_of
from torchembed.tables import Initializer, Storage

PARAMETER = "torchembed_storage"
"""Name under which the storage of such tables is among a kernel's ``fused_params``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenStorage:
    """The storage of the tables of a kernel, equal for those that TorchRec puts into one."""

    storage: Storage
    initializers: Mapping[str, Initializer] = dataclasses.field(compare=False)
    """The initializers of all tables of the collection, by name."""


def given_storages(module: nn.Module) -> dict[str, Storage]:
    """The storages of the tables of an unsharded collection of TorchRec's that were given one, by
    name."""
    return {
        config.name: config.storage
        for config in table_configs(module)
        if isinstance(config, EmbeddingBagConfig | EmbeddingConfig) and config.storage is not None
    }


def described(name: str) -> str:
    """Such a table, in errors."""
    return f"table {name} with a storage"


def check_given_storages(module: nn.Module, params: Mapping[str, ParameterSharding]) -> None:
    """Raise ``ValueError`` where the plan of such a table of ``module`` puts it where it cannot
    be."""
    for name in given_storages(module):
        check_placement(described(name), params[name].sharding_type, params[name].compute_kernel)


def note_given_storages(infos: Iterable[EmbeddingShardingInfo], module: nn.Module) -> None:
    """Put the storage of such tables of ``module`` into the ``fused_params`` of their infos, in
    place."""
    storages = given_storages(module)
    configs = {config.name: config for config in table_configs(module) if config.name in storages}
    initializers = {name: initializer_of(config) for name, config in configs.items()}
    for info in infos:
        name = info.embedding_config.name
        if name in storages:
            given = GivenStorage(storage=storages[name], initializers=initializers)
            info.fused_params = {**(info.fused_params or {}), PARAMETER: given}


def given_storage(config: GroupedEmbeddingConfig) -> GivenStorage | None:
    """The storage that a kernel's tables were given; None where they were given none."""
    return cast("GivenStorage | None", (config.fused_params or {}).get(PARAMETER))
