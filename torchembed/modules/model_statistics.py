"""Names for the dynamic tables and the caches of a whole model, and their statistics."""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchembed.modules.calls_ahead import ModuleOfOneTable
from torchembed.modules.table_module import TableModule
from torchembed.tables import (
    CacheStatisticsReading,
    CountedCaches,
    CountedTables,
    StatisticsReading,
    Table,
)


class _Found(NamedTuple):
    """A dynamic table of a model, and where it is."""

    name: str
    full_name: str
    table: Table | None
    device: torch.device
    group: dist.ProcessGroup | None


def dynamic_tables(model: nn.Module) -> list[CountedTables]:
    """The dynamic tables of ``model`` by name, those of each device and process group together.

    The name is that of the table's config, behind the collection's name in the model where several
    tables have it, as ``users.item``; that of a module of one table is its own name in the model.
    """
    found: list[_Found] = []
    for path, module in model.named_modules():
        if isinstance(module, TableModule) and module.admission_changes_tables:
            is_alone = isinstance(module, ModuleOfOneTable)
            counted = module.counted_tables()
            for table_name, table in counted.tables.items():
                name = path if is_alone and path else table_name
                full = name if is_alone else f"{path}.{name}".strip(".")
                found.append(_Found(name, full, table, counted.device, counted.group))
    count = Counter(one.name for one in found)
    together: dict[tuple[torch.device, dist.ProcessGroup | None], dict[str, Table | None]] = {}
    for name, full, table, device, group in found:
        named = together.setdefault((device, group), {})
        named[name if count[name] == 1 else full] = table
    return [CountedTables(tables, *place) for place, tables in together.items()]


def caches(model: nn.Module) -> list[CountedCaches[str]]:
    """The caches of tables of ``model`` in host memory: those of a module, on all ranks that share
    its tables, together under its name in the model, as ``users.cache``."""
    counted = [
        module.counted_caches(f"{path}.cache".strip("."))
        for path, module in model.named_modules()
        if isinstance(module, TableModule)
    ]
    return [one for one in counted if one.caches]


class ModelStatistics:
    """A copy of the counters of a model's dynamic tables and caches to the host, which was begun on
    the current stream.

    Collective over the ranks that share tables; waits for no GPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = StatisticsReading(dynamic_tables(model))
        self._caches = CacheStatisticsReading(caches(model))

    def scalars(self) -> dict[str, float]:
        """The counts by the names that metrics give them, as ``item/size`` of table ``item`` and
        ``users.cache/hit_rate``; waits for the copy."""
        found = {**self._tables.result(), **self._caches.result()}
        return {
            f"{name}/{figure}": value
            for name, statistics in found.items()
            for figure, value in statistics.scalars().items()
        }


def shares_statistics(model: nn.Module) -> bool:
    """True if to read the statistics of ``model`` is collective."""
    counted = [*dynamic_tables(model), *caches(model)]
    return any(one.group is not None for one in counted)
