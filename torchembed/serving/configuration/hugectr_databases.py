"""Databases and the source of updates in HugeCTR's configuration."""

import os
import re
from pathlib import Path
from typing import Any

from torchembed.serving.configuration.choices import VolatileKind
from torchembed.serving.configuration.fields import AtLeast, Between, Inside
from torchembed.serving.configuration.hugectr_section import Section
from torchembed.serving.configuration.level_configs import (
    PersistentConfig,
    RedisTlsConfig,
    UpdateConfig,
    VolatileConfig,
)
from torchembed.stores import OverflowPolicy
from torchembed.stores.volatile.options import MAX_BATCH_ROWS
from torchembed.streams.source_options import MAX_MESSAGES

_NO_MARGIN = 2**64 - 1
_DEFAULT_FILTER = "^hps_.+$"
"""Matches no topic as HugeCTR uses it."""
_MEMORY = ("hash_map", "parallel_hash_map", "multi_process_hash_map")
_REDIS, _DISABLED = "redis_cluster", "disabled"


def read_volatile(values: Any, left_out: list[str]) -> tuple[VolatileConfig | None, list[str]]:
    """The level of ``volatile_db``, None where it is disabled, and its filters of updates.

    Raises:
        ValueError: for keys that HugeCTR does not have, and for values that cannot be.
    """
    section = Section(values, "volatile_db", left_out)
    kind = _type(section, "parallel_hash_map", (*_MEMORY, _REDIS, _DISABLED))
    if kind == "multi_process_hash_map":
        section.note("type", "each process has a map of its own; share rows by redis_cluster")
    margin = section.take("overflow_margin", int, _NO_MARGIN, AtLeast(1))
    common = {
        "num_partitions": section.take(
            "num_partitions", int, min(16, os.cpu_count() or 1), AtLeast(1)
        ),
        "max_batch_rows": _max_batch_rows(section),
        "overflow_margin_rows": None if margin == _NO_MARGIN else margin,
        "overflow_policy": _policy(section),
        "overflow_resolution_target": section.take(
            "overflow_resolution_target", float, 0.8, Inside(0, 1)
        ),
        "inserts_missed_rows": section.take("cache_missed_embeddings", bool, False),
    }
    share = section.take("initial_cache_rate", float, 1.0, Between(0, 1))
    loads = section.take("initialize_after_startup", bool, True)
    common["initial_share"] = share if loads else 0.0
    redis = _redis(section)
    for key in ("shared_memory_size", "shared_memory_name", "shared_memory_auto_remove"):
        section.leave_out(key, "left out; memory is not shared among processes")
    for key in ("allocation_rate", "algorithm"):
        section.leave_out(key, "left out; memory grows by itself")
    section.leave_out(
        "refresh_time_after_fetch", "left out; evict_oldest goes by the time of the last access"
    )
    filters = section.take_list("update_filters", str) or [_DEFAULT_FILTER]
    section.end()
    if kind == _DISABLED:
        return None, []
    if kind == _REDIS:
        return VolatileConfig(kind=VolatileKind.REDIS, is_cluster=True, **common, **redis), filters
    return VolatileConfig(**common), filters


def read_persistent(values: Any, left_out: list[str]) -> tuple[PersistentConfig | None, list[str]]:
    """The level of ``persistent_db``, None where it is disabled, and its filters of updates.

    Raises:
        ValueError: for keys that HugeCTR does not have, and for values that cannot be.
    """
    section = Section(values, "persistent_db", left_out)
    kind = _type(section, _DISABLED, ("rocks_db", _DISABLED))
    path = section.take("path", str, "")
    is_read_only = section.take("read_only", bool, False)
    num_threads = section.take("num_threads", int, 16, AtLeast(1))
    max_batch_rows = section.take("max_batch_size", int, 65_536, AtLeast(1))
    loads = section.take("initialize_after_startup", bool, True)
    filters = section.take_list("update_filters", str) or [_DEFAULT_FILTER]
    for key in ("max_get_batch_size", "max_set_batch_size"):
        section.leave_out(key, "left out; max_batch_size says it since HugeCTR 4.0")
    section.end()
    if kind == _DISABLED:
        return None, []
    if not path:
        raise ValueError("persistent_db.path must be a folder where type is rocks_db, got none")
    config = PersistentConfig(
        path=Path(path),
        is_read_only=is_read_only,
        num_threads=num_threads,
        max_batch_rows=max_batch_rows,
        is_loaded=loads,
    )
    return config, filters


def read_updates(values: Any, filters: list[str], left_out: list[str]) -> UpdateConfig | None:
    """The updates of ``update_source``, None where there is none.

    Args:
        filters: of both databases, regular expressions of models.

    Raises:
        ValueError: for keys that HugeCTR does not have, and for values that cannot be.
    """
    section = Section(values, "update_source", left_out)
    kind = _type(section, "null", ("null", "kafka_message_queue"))
    brokers = section.take("brokers", str, "127.0.0.1:9092")
    refresh_ms = section.take("metadata_refresh_interval_ms", int, 30_000, AtLeast(1))
    poll_ms = section.take("poll_timeout_ms", int, 500, AtLeast(1))
    max_batch = section.take("max_batch_size", int, 8192, Between(1, MAX_MESSAGES))
    back_off_ms = section.take("failure_backoff_ms", int, 50, AtLeast(1))
    section.leave_out("max_commit_interval", "left out; each batch is committed once it is applied")
    section.leave_out("receive_buffer_size", "left out; librdkafka has buffers of its own")
    section.end()
    if kind == "null":
        return None
    return UpdateConfig(
        brokers=_addresses(brokers),
        filters=_topic_filters(filters),
        max_batch_messages=max_batch,
        poll_timeout_seconds=poll_ms / 1000,
        metadata_refresh_seconds=refresh_ms / 1000,
        failure_back_off_seconds=back_off_ms / 1000,
    )


def _type(section: Section, default: str, known: tuple[str, ...]) -> str:
    kind = section.take("type", str, default)
    if kind not in known:
        raise ValueError(
            f"{section.path_of('type')} must be one of {', '.join(known)}, got {kind!r}"
        )
    return kind


def _max_batch_rows(section: Section) -> int:
    """``max_batch_size``, or the lesser of the two that it was before."""
    limit = Between(1, MAX_BATCH_ROWS)
    earlier = [
        section.take(key, int, MAX_BATCH_ROWS, limit)
        for key in ("max_get_batch_size", "max_set_batch_size")
    ]
    default = min(65_536, *earlier)
    return section.take("max_batch_size", int, default, limit)


def _policy(section: Section) -> OverflowPolicy:
    name = section.take("overflow_policy", str, OverflowPolicy.EVICT_RANDOM.value)
    policies = {policy.value: policy for policy in OverflowPolicy}
    if name not in policies:
        raise ValueError(
            f"{section.path_of('overflow_policy')} must be one of {', '.join(policies)}, got "
            f"{name!r}"
        )
    return policies[name]


def _redis(section: Section) -> dict[str, Any]:
    """What only Redis has."""
    is_secured = section.take("enable_tls", bool, False)
    tls = RedisTlsConfig(
        ca_certificate=Path(section.take("tls_ca_certificate", str, "cacertbundle.crt")),
        certificate=Path(section.take("tls_client_certificate", str, "client_cert.pem")),
        key=Path(section.take("tls_client_key", str, "client_key.pem")),
        server_name=section.take("tls_server_name_identification", str, None),
    )
    user = section.take("user_name", str, "default")
    password = section.take_secret("password", "")
    return {
        "addresses": _addresses(section.take("address", str, "127.0.0.1:7000")),
        # Without a password nobody logs in, and is Redis' user of that name.
        "user_name": None if user == "default" and not password else user,
        "password": password or None,
        "num_connections": section.take("num_node_connections", int, 5, AtLeast(1)),
        "tls": tls if is_secured else None,
    }


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split("[,;]", text) if part.strip())


def _topic_filters(filters: list[str]) -> tuple[str, ...]:
    """Regular expressions of topics for those of models."""
    of_models = list(dict.fromkeys(filters))
    if _DEFAULT_FILTER in of_models:
        return ()
    plain = (f.removeprefix("^").removesuffix("$") for f in of_models)
    return tuple(rf"hps_et\.(?:{f})\..+" for f in plain)
