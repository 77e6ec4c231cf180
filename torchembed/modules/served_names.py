"""The names by which servers know the tables and the dense tensors of a model."""

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor, nn

from torchembed.modules.collection import Collection
from torchembed.modules.sharded.sharded_collection import ShardedCollection
from torchembed.modules.sharded.sharded_single_table import ShardedSingleTable
from torchembed.modules.single_table import SingleTable

ServedTables: TypeAlias = Collection | ShardedCollection | SingleTable | ShardedSingleTable
"""The modules whose tables can be served."""
_KINDS = (Collection, ShardedCollection, SingleTable, ShardedSingleTable)


def served_modules(model: nn.Module) -> dict[str, ServedTables]:
    """The table modules in ``model`` by their paths, each once."""
    return {path: m for path, m in model.named_modules() if isinstance(m, _KINDS)}


def weights_of(path: str, module: ServedTables) -> dict[str, str]:
    """The weight of each table of the module at ``path``, as ``state_dict`` names it, by the
    table's name in the module; that of an only table is the path."""
    prefix = f"{path}." if path else ""
    if isinstance(module, Collection | ShardedCollection):
        container = f"{prefix}{module._container}"
        return {config.name: f"{container}.{config.name}.weight" for config in module._configs}
    return {path or "table": f"{prefix}weight"}


def table_names(model: nn.Module) -> dict[str, str]:
    """The name under which each table is served, by its weight in ``state_dict``; the same on all
    ranks.

    It is the table's own where no other table has it, else with the path of its module before. A
    weight that modules share is one table, by its first name.
    """
    tied = tied_weights(model)
    named = [
        (path, own, weight)
        for path, module in served_modules(model).items()
        for own, weight in weights_of(path, module).items()
        if weight not in tied
    ]
    count = Counter(own for _, own, _ in named)
    return {weight: own if count[own] == 1 else f"{path}.{own}" for path, own, weight in named}


def tied_weights(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter that ``state_dict`` has under several, by each other one."""
    first: dict[nn.Parameter, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, name)
        if known != name:
            found[name] = known
    return found


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of all of ``model`` but its tables, by the names that they have in the
    dense part of a model that is served; the model's own, not copies."""
    tables = set(served_modules(model).values())
    found: dict[str, Tensor] = {}
    seen: set[Tensor] = set()
    for name, tensor in (*_named(model, tables, "_parameters"), *_named(model, tables, "_buffers")):
        if tensor not in seen:
            seen.add(tensor)
            found[name] = tensor.detach()
    return found


def _named(
    model: nn.Module, tables: set[ServedTables], attribute: str
) -> Iterator[tuple[str, Tensor]]:
    # A module that was met is not met again: neither tables nor what is in them.
    met: set[nn.Module] = {inside for table in tables for inside in table.modules()}
    for path, module in model.named_modules(memo=met):
        for name, tensor in getattr(module, attribute).items():
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor
