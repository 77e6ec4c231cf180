"""All that depends on TorchRec's version: which ones fit, and what is read of its private parts.

Imported before any other module here, so that another version is named before anything of it fails.
"""

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

check_version(getattr(torchrec, "__version__", "unknown"))


class LookupArguments(NamedTuple):
    """What TorchRec's shardings give to their lookups."""

    grouped_configs: list[Any]
    pg: Any
    device: Any
    env: Any


def lookup_arguments(sharding: Any) -> LookupArguments:
    """What ``sharding.create_lookup()`` would build its lookup from."""
    per_rank = getattr(sharding, "_grouped_embedding_configs_per_rank", None)
    configs = getattr(sharding, "_grouped_embedding_configs", None)
    return LookupArguments(
        per_rank[sharding._rank] if configs is None and per_rank is not None else configs,  # type: ignore[arg-type]
        getattr(sharding, "_pg", sharding._env.process_group),
        sharding._device,
        sharding._env,
    )
