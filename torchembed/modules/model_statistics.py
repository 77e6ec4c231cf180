"""Names for the dynamic tables of a whole model, and their statistics."""

from collections import Counter

from torch import nn

from torchembed.modules.calls_ahead import ModuleOfOneTable
from torchembed.modules.table_module import TableModule
from torchembed.tables import StatisticsReading, Table


def dynamic_tables(model: nn.Module) -> dict[str, Table]:
    """The dynamic tables of ``model`` by name.

    The name is that of the table's config, behind the collection's name in the model where several
    tables have it, as ``users.item``; that of a module of one table is its own name in the model.
    """
    found: list[tuple[str, str, Table]] = []
    for path, module in model.named_modules():
        if isinstance(module, TableModule) and module.admission_changes_tables:
            for table in module.table_set.tables:
                if table.group.index.changes_on_admission:
                    is_alone = isinstance(module, ModuleOfOneTable)
                    name = path if is_alone and path else table.spec.name
                    found.append((name, name if is_alone else f"{path}.{name}".strip("."), table))
    count = Counter(name for name, _, _ in found)
    return {(name if count[name] == 1 else full): table for name, full, table in found}


def begin_statistics(model: nn.Module) -> StatisticsReading:
    """Begin to read the statistics of the dynamic tables of ``model``; does not wait for a GPU."""
    return StatisticsReading(dynamic_tables(model))
