"""TorchRec's configs of tables with fields more: what makes a table dynamic, and where its rows
live."""

import dataclasses

from torchrec.modules.embedding_configs import EmbeddingBagConfig as TorchrecBagConfig
from torchrec.modules.embedding_configs import EmbeddingConfig as TorchrecConfig

from torchembed.modules import configs
from torchembed.modules.configs import (
    as_config,
    check_dynamic,
    check_storage,
    dtype_of,
    initializer_of,
)
from torchembed.tables import Disk, Dynamic, Initializer, Storage


def _check(config: "EmbeddingBagConfig | EmbeddingConfig") -> None:
    if config.dynamic is not None and config.storage is not None:
        raise ValueError(
            f"storage of dynamic table {config.name} must be None under TorchRec, got "
            f"{config.storage}; leave it out, or take torchembed's own EmbeddingBagCollection"
        )
    if config.dynamic is not None:
        check_dynamic(
            f"table {config.name}",
            config.dynamic,
            initializer_of(config),
            dim=config.embedding_dim,
            dtype=dtype_of(config),
        )
        if config.dynamic.initial_capacity is not None:
            raise ValueError(
                f"initial_capacity of dynamic table {config.name} must be None under TorchRec, "
                f"whose plans fix the rows of each rank, got {config.dynamic.initial_capacity}; "
                "leave it out, and choose num_embeddings by the memory that there is"
            )
        if config.dynamic.max_rows is not None or config.dynamic.max_bytes is not None:
            raise ValueError(
                f"max_rows and max_bytes of dynamic table {config.name} must be None under "
                f"TorchRec, got {config.dynamic.max_rows} and {config.dynamic.max_bytes}; leave "
                "them out, and choose num_embeddings by the rows that there may be"
            )
    elif config.initializer is not None and not isinstance(config.storage, Disk):
        raise ValueError(
            f"initializer of table {config.name} must be None unless the table is dynamic or on "
            "disk; give init_fn, dynamic=Dynamic() or storage=Disk(...)"
        )
    check_storage(f"table {config.name}", config.storage, None, initializer_of(config))


@dataclasses.dataclass
class EmbeddingBagConfig(TorchrecBagConfig):
    """One table of TorchRec's ``EmbeddingBagCollection``, which may be dynamic, or elsewhere than
    on the device.

    ``num_embeddings`` of a dynamic table is its capacity: ids are any 64-bit integers, and get rows
    as training meets them. Other fields are TorchRec's.
    """

    dynamic: Dynamic | None = None
    """None for a table with a row for each number, as TorchRec's own config has it."""
    initializer: Initializer | None = None
    """``Uniform``, ``Normal`` or ``Constant``, for the rows of a table that is dynamic or on disk;
    None: uniform, as ``weight_init_min`` and ``weight_init_max`` say."""
    storage: Storage | None = None
    """``HostMemory`` or ``Disk``, with the cache of each rank, of a table that is not dynamic; None
    where the plan's compute kernel says where its rows live."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def to_torchembed(self) -> configs.EmbeddingConfig:
        """The same table as torchembed's collections take it."""
        return as_config(self, configs.EmbeddingBagConfig)


@dataclasses.dataclass
class EmbeddingConfig(TorchrecConfig):
    """One table of TorchRec's ``EmbeddingCollection``, with the choices of an
    :class:`EmbeddingBagConfig`."""

    dynamic: Dynamic | None = None
    """As in :class:`EmbeddingBagConfig`."""
    initializer: Initializer | None = None
    """As in :class:`EmbeddingBagConfig`."""
    storage: Storage | None = None
    """As in :class:`EmbeddingBagConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def to_torchembed(self) -> configs.EmbeddingConfig:
        """The same table as torchembed's collections take it."""
        return as_config(self, configs.EmbeddingConfig)
