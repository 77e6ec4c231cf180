"""All that depends on TorchRec's version: which ones fit, and what is read of its private parts.

Imported before any other module here, so that another version is named before anything of it fails.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torchembed.core.versions import release_number

OLDEST, NEWEST = (1, 6), (1, 9)


def check_version(version: str) -> None:
    """Raise an ``ImportError`` where ``version`` of TorchRec is none that these modules were
    written for."""
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
from torchrec.distributed.dist_data import _get_recat as exchange_order  # noqa: E402

__all__ = [
    "LookupArguments",
    "check_version",
    "dense_parameters_by_table",
    "exchange_order",
    "frees_features_early",
    "grouped_configs",
    "is_tracked",
    "lookup_arguments",
    "table_feature",
]


class LookupArguments(NamedTuple):
    """What TorchRec's shardings give to their lookups."""

    grouped_configs: list[Any]
    pg: Any
    device: Any
    env: Any


def lookup_arguments(sharding: Any) -> LookupArguments:
    """What ``sharding.create_lookup()`` would build its lookup from."""
    configs = getattr(sharding, "_grouped_embedding_configs", None)
    if configs is None:  # table-row-wise
        configs = sharding._grouped_embedding_configs_per_rank[sharding._rank]
    return LookupArguments(
        configs,
        # Data-parallel shardings have no group of their own.
        getattr(sharding, "_pg", sharding._env.process_group),
        sharding._device,
        sharding._env,
    )


def grouped_configs(shardings: Iterable[Any]) -> list[Any]:
    """What the kernels of all ranks are made from."""
    found: list[Any] = []
    for sharding in shardings:
        per_rank = getattr(sharding, "_grouped_embedding_configs_per_rank", None)
        if per_rank is None:  # data-parallel
            per_rank = [sharding._grouped_embedding_configs]
        found += itertools.chain.from_iterable(per_rank)
    return found


def frees_features_early(module: Any) -> bool:
    """Whether a pipeline asked ``module`` to give the memory of features back; from 1.8 on."""
    return getattr(module, "_free_features_storage_early", False)


def is_tracked(module: Any) -> bool:
    """Whether functions are to be called between a lookup and what follows; not of all versions."""
    names = ("post_lookup_tracker_fn", "post_odist_tracker_fn")
    return any(getattr(module, name, None) is not None for name in names)


def table_feature(config: Any) -> str | None:
    """What a table has that some of these versions do not know and ours do not have."""
    names = ("use_virtual_table", "enable_embedding_update", "stash_weights")
    return next((name for name in names if getattr(config, name, False)), None)
