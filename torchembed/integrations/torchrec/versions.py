"""Everything that depends on TorchRec's version: supported versions, and reads of its privates.

Imported before any other module of this package, so that an unsupported version is named before
something in it fails.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.core.versions import release_number

OLDEST, NEWEST = (1, 6), (1, 9)
"""Supported releases of TorchRec, both included."""


def check_version(version: str) -> None:
    """Raise an ``ImportError`` unless this package supports ``version`` of TorchRec."""
    if not OLDEST <= release_number(version) <= NEWEST:
        oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
        raise ImportError(
            f"torchembed.integrations.torchrec needs TorchRec {oldest} to {newest}, got {version}; "
            "install one of these, or shard without TorchRec by torchembed.shard_embeddings"
        )


try:
    import torchrec
except ImportError as error:
    raise ImportError(
        "torchembed.integrations.torchrec needs TorchRec and FBGEMM; pip install "
        f"torchembed[torchrec] ({error})"
    ) from error

check_version(getattr(torchrec, "__version__", "0"))


# Private functions that all of these versions have.
from torchrec.distributed.batched_embedding_kernel import (  # noqa: E402
    _gen_named_parameters_by_table_dense as dense_parameters_by_table,
)
from torchrec.distributed.dist_data import KJTAllToAll  # noqa: E402
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig  # noqa: E402
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator  # noqa: E402
from torchrec.distributed.planner.types import ShardingOption  # noqa: E402
from torchrec.distributed.planner.utils import sharder_name  # noqa: E402
from torchrec.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding  # noqa: E402
from torchrec.distributed.sharding.rw_sharding import (  # noqa: E402
    BaseRwEmbeddingSharding,
    RwSparseFeaturesDist,
)
from torchrec.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding  # noqa: E402
from torchrec.distributed.sharding.twrw_sharding import (  # noqa: E402
    BaseTwRwEmbeddingSharding,
    TwRwSparseFeaturesDist,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv  # noqa: E402
from torchrec.modules.embedding_configs import BaseEmbeddingConfig  # noqa: E402
from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingCollection,
)

__all__ = [
    "ExchangeOfRows",
    "LookupArguments",
    "Sharding",
    "check_version",
    "dense_parameters_by_table",
    "exchange_of_rows",
    "grouped_configs",
    "lookup_arguments",
    "sent_configs",
    "sharder_of",
    "unsupported_table_setting",
    "with_configs",
]

C = TypeVar("C", EmbeddingBagCollection, EmbeddingCollection)

Sharding: TypeAlias = (
    BaseTwEmbeddingSharding
    | BaseRwEmbeddingSharding
    | BaseTwRwEmbeddingSharding
    | BaseDpEmbeddingSharding
)
"""TorchRec's sharding of the tables of a module that have one sharding type; column-wise shardings
are table-wise ones of columns."""


class LookupArguments(NamedTuple):
    """Arguments that TorchRec's shardings pass to their lookups."""

    grouped_configs: list[GroupedEmbeddingConfig]
    pg: dist.ProcessGroup | None
    device: torch.device | None
    env: ShardingEnv


def lookup_arguments(sharding: Sharding) -> LookupArguments:
    """The arguments that ``sharding.create_lookup()`` would make its lookup with."""
    if isinstance(sharding, BaseTwRwEmbeddingSharding):
        configs = sharding._grouped_embedding_configs_per_rank[sharding._rank]
    else:
        configs = sharding._grouped_embedding_configs
    # Data-parallel shardings have no group of their own.
    pg = getattr(sharding, "_pg", sharding._env.process_group)
    return LookupArguments(configs, pg, sharding._device, sharding._env)


def grouped_configs(shardings: Iterable[Sharding]) -> list[GroupedEmbeddingConfig]:
    """The configs of the kernels of all ranks."""
    found: list[GroupedEmbeddingConfig] = []
    for sharding in shardings:
        per_rank = getattr(sharding, "_grouped_embedding_configs_per_rank", None)
        if per_rank is None:  # data-parallel, in some versions
            assert isinstance(sharding, BaseDpEmbeddingSharding)
            per_rank = [sharding._grouped_embedding_configs]
        found += itertools.chain.from_iterable(per_rank)
    return found


class ExchangeOfRows(NamedTuple):
    """Parts of TorchRec's exchange of ids of tables whose rows ranks share."""

    exchange: KJTAllToAll
    block_sizes: Tensor
    """int64 or int32 ``[F]``: for each feature the rows of its table on each rank."""
    num_ranks: int
    """Ranks that share the rows."""
    order: tuple[list[int], Tensor] | None
    """The order in which bucketized features are sent; None where it is theirs."""


def exchange_of_rows(
    source: RwSparseFeaturesDist | TwRwSparseFeaturesDist,
) -> ExchangeOfRows:
    """The parts of ``source``."""
    block_sizes = cast("Tensor", source._feature_block_sizes_tensor)
    if isinstance(source, RwSparseFeaturesDist):
        return ExchangeOfRows(source._dist, block_sizes, source._world_size, None)
    shuffle = cast("Tensor", source._sf_staggered_shuffle_tensor)
    order = source._sf_staggered_shuffle, shuffle
    return ExchangeOfRows(source._dist, block_sizes, source._local_size, order)


def with_configs(module: C, change: Callable[[BaseEmbeddingConfig], BaseEmbeddingConfig]) -> C:
    """A view of an unsharded ``module`` whose configs are changed."""
    is_pooled = isinstance(module, EmbeddingBagCollection)
    attribute = "_embedding_bag_configs" if is_pooled else "_embedding_configs"
    made = copy.copy(module)
    setattr(made, attribute, [change(config) for config in getattr(module, attribute)])
    return made


def sent_configs(sharding: Sharding) -> list[GroupedEmbeddingConfig]:
    """The configs of the kernels that each id is sent to, in the order of the features that are
    exchanged: those of one rank of each group of ranks that share rows, or of all ranks."""
    if isinstance(sharding, BaseTwRwEmbeddingSharding):
        return list(itertools.chain(*sharding._grouped_embedding_configs_per_node))
    if isinstance(sharding, BaseRwEmbeddingSharding):
        return sharding._grouped_embedding_configs
    return grouped_configs([sharding])


def sharder_of(enumerator: EmbeddingEnumerator, option: ShardingOption) -> ModuleSharder[nn.Module]:
    """The sharder that ``enumerator``, which made ``option``, was given for its module."""
    return enumerator._sharder_map[sharder_name(type(option.module[1]))]


def unsupported_table_setting(config: BaseEmbeddingConfig) -> str | None:
    """Name of a setting of a table that only some of these versions know and torchembed does not
    have; None where the table has none."""
    names = ("use_virtual_table", "enable_embedding_update", "stash_weights")
    return next((name for name in names if getattr(config, name, False)), None)
