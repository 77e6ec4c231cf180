"""The memory that a server needs, as a table, before anything is loaded."""

import os

from torchembed.serving.configuration import ModelConfig, ServerConfig
from torchembed.serving.levels import CACHED_KEY_BYTES, CacheKind
from torchembed.serving.models import (
    ModelDescription,
    models_in,
    read_description,
    version_folder,
    versions_in,
)
from torchembed.serving.models.memory_needs import memory_needs
from torchembed.serving.models.version_loader import served_tables
from torchembed.serving.server.lookups import model_options
from torchembed.serving.server.stores import StoreStack, row_bytes_of


def memory_table(config: ServerConfig) -> str:
    """A line for each table, dense part and cache that is to be loaded, and one for their sum.

    Rows count as far as they take this process's memory: in its volatile level, and to be found in
    RocksDB.

    Raises:
        ValueError: for a model that is not there, and where the sum exceeds ``max_memory_bytes``,
            or the machine's memory where that is not given.
    """
    folder, lines, total = config.models_folder, list[str](), 0
    named = {model.name: model for model in config.models}
    counted: set[str] = set()
    for name in named or models_in(folder):
        model = named.get(name) or ModelConfig(name=name)
        options = model_options(model, StoreStack((), (), (), row_bytes_of(config), None))
        found = versions_in(folder, name)
        if not found:
            raise ValueError(f"models must be in {folder}, and {name} has no version there")
        for number in sorted(options.versions) or found[-options.num_latest_versions :]:
            description = read_description(version_folder(folder, name, number))
            _check_dims(model, description)
            tables = dict(served_tables(description, options).values())
            needs = memory_needs(description, tables, options.row_bytes, options.captured_sizes)
            parts = {f"dense part of {name}, version {number}": needs.dense}
            if needs.captured:
                parts[f"captured answers of {name}, version {number}"] = needs.captured
            new = {table: n for table, n in tables.items() if table.name not in counted}
            counted |= {table.name for table in new}
            if any(needs.tables.values()) and model.cache.kind is not CacheKind.STATIC:
                parts |= {f"rows of {table.name}": needs.tables[table.name] for table in new}
            if new:
                mean = sum(table.line_bytes + CACHED_KEY_BYTES for table in new) // len(new)
                cached = model.cache.num_rows(sum(new.values()), mean)
                if model.cache.kind is CacheKind.UVM:
                    whole = sum(new.values()) * mean
                    parts[f"whole tables of {name}, version {number}"] = whole
                parts[f"cache of {name}, version {number}"] = cached * mean
            lines += [f"{num_bytes:>20,}  {what}" for what, num_bytes in parts.items()]
            total += sum(parts.values())
    limit = config.max_memory_bytes
    there = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > there:
        source = "max_memory_bytes allows" if limit else "the machine has"
        raise ValueError(
            f"models of {folder} need {total:,} bytes of memory, and {source} {there:,}; give "
            "tables a narrower row format, or bound the volatile level above a persistent one"
        )
    return "\n".join([*lines, f"{total:>20,}  bytes in all, of {there:,}"])


def _check_dims(model: ModelConfig, description: ModelDescription) -> None:
    """Raise ``ValueError`` where rows of HugeCTR have another width than the model's tables."""
    for table in description.tables:
        rows = model.hugectr_rows.get(table.name)
        if rows is not None and rows.dim not in (None, table.dim):
            raise ValueError(
                f"dim of hugectr_rows (embedding_vecsize_per_table) of table {table.name} must be "
                f"{table.dim}, as version {description.version} of model {model.name} has it, got "
                f"{rows.dim}"
            )
