"""Names for the dynamic tables of a whole model, and their statistics."""

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchembed.modules.calls_ahead import ModuleOfOneTable
from torchembed.modules.table_module import TableModule
from torchembed.tables import CountedTables, StatisticsReading, Table


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


def begin_statistics(model: nn.Module) -> StatisticsReading:
    """Begin to read the statistics of the dynamic tables of ``model``, those of whole tables where
    ranks share them.

    Collective over these ranks; does not wait for a GPU.
    """
    return StatisticsReading(dynamic_tables(model))
