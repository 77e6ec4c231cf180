"""HugeCTR's configuration of parameter servers (``ps.json``) as one of ours."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchembed.serving.configuration.files import read_values
from torchembed.serving.configuration.hugectr_databases import (
    read_persistent,
    read_updates,
    read_volatile,
)
from torchembed.serving.configuration.hugectr_models import read_model
from torchembed.serving.configuration.hugectr_section import Section
from torchembed.serving.configuration.server_config import ServerConfig

_ITS_OWN_KEYS = ("supportlonglong", "fuse_embedding_table", "volatile_db", "persistent_db")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HugectrConfig:
    """What a file of HugeCTR says."""

    server: ServerConfig
    left_out: tuple[str, ...]
    """A sentence for each key that has no effect here, or another one than in HugeCTR."""


def is_hugectr(values: Any) -> bool:
    """True where the values of a file are HugeCTR's, and not those of a ``ServerConfig``."""
    if not isinstance(values, Mapping):
        return False
    models = values.get("models")
    names_model = isinstance(models, list) and any(
        isinstance(model, Mapping) and "model" in model for model in models
    )
    return names_model or any(key in values for key in _ITS_OWN_KEYS)


def read_hugectr_config(path: str | Path, models_folder: str | Path) -> HugectrConfig:
    """The configuration in a ``ps.json`` of HugeCTR.

    Every key has its effect, or is in ``left_out``, or is refused. Its models need their dense
    parts in the models folder.

    Args:
        models_folder: of the server.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: for keys that HugeCTR does not have, and for values that cannot be; it names
            the file and the key's path.
    """
    try:
        return hugectr_config(read_values(path), models_folder)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def hugectr_config(values: Any, models_folder: str | Path) -> HugectrConfig:
    """As :func:`read_hugectr_config`, of the values of the file."""
    left_out: list[str] = []
    section = Section(values, "", left_out)
    if not section.take("supportlonglong", bool, True):
        raise ValueError(
            "supportlonglong must be true, since keys have 64 bits; convert those of 32 bits in "
            "the files named key"
        )
    # Lookups of several tables are one call anyway, and keys of different tables may be equal.
    is_fused = section.take("fuse_embedding_table", bool, False)
    members = section.take_any("models")
    if not isinstance(members, list) or not members:
        raise ValueError(f"models must be a list of at least one model, got {members!r}")
    models = tuple(
        read_model(member, f"models[{i}]", left_out, is_fused=is_fused)
        for i, member in enumerate(members)
    )
    volatile, volatile_filters = read_volatile(section.take_object("volatile_db"), left_out)
    persistent, other_filters = read_persistent(section.take_object("persistent_db"), left_out)
    filters = volatile_filters + [f for f in other_filters if f not in volatile_filters]
    if volatile is not None and persistent is not None and volatile_filters != other_filters:
        section.note("update_filters", "updates of either database go to both")
    updates = read_updates(section.take_object("update_source"), filters, left_out)
    section.end()
    server = ServerConfig(
        models_folder=Path(models_folder),
        models=models,
        volatile=volatile,
        persistent=persistent,
        updates=updates,
    )
    return HugectrConfig(server=server, left_out=tuple(left_out))
