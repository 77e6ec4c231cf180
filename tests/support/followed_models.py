"""Models that updates are applied to: real lookups for rows, and the last dense part."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchembed.serving.interface import UnknownModelError
from torchembed.serving.levels import EmbeddingCache, LeveledLookup, RowLevels, ServedTable
from torchembed.stores import MemoryStore, RowStore


class FollowedModels:
    """The tables of some models in one lookup, as ``<model>/<table>``.

    Attributes:
        dense: the last dense part of each model, and its version.
        applied: versions of row updates by table, in order.
    """

    def __init__(self, lookup: LeveledLookup) -> None:
        self.lookup = lookup
        self.dense: dict[str, tuple[int, Mapping[str, Tensor]]] = {}
        self.applied: dict[str, list[int]] = {}

    def apply_rows(
        self,
        model: str,
        table: str,
        keys: Tensor,
        rows: Tensor,
        *,
        version: int,
        deleted_keys: Tensor | None = None,
    ) -> None:
        if not any(t.name.startswith(f"{model}/") for t in self.lookup.cache.tables):
            raise UnknownModelError(f"there is no model {model}")
        self.lookup.apply_rows(f"{model}/{table}", keys, rows, deleted_keys)
        self.applied.setdefault(f"{model}/{table}", []).append(version)

    def swap_dense(self, model: str, tensors: Mapping[str, Tensor], version: int) -> None:
        known = self.dense.get(model)
        if known is not None and known[1].keys() != tensors.keys():
            raise ValueError(f"tensors must be {sorted(known[1])}, got {sorted(tensors)}")
        self.dense[model] = version, tensors

    def rows_of(self, table: str, ids: Sequence[int]) -> dict[int, Tensor]:
        """The rows that a lookup gives for those of ``ids`` that have one."""
        keys = torch.tensor(list(ids), dtype=torch.int64)
        place = [t.name for t in self.lookup.cache.tables].index(table)
        found = self.lookup.look_up(keys, torch.full((len(keys),), place, dtype=torch.int32))
        dim = self.lookup.cache.tables[place].dim
        return {
            id_: row[:dim]
            for id_, row, is_default in zip(
                keys.tolist(), found.rows, found.is_default.tolist(), strict=True
            )
            if not is_default
        }


@contextlib.contextmanager
def followed_models(
    dims: Mapping[str, int], stores: Sequence[RowStore] | None = None, num_rows: int = 4096
) -> Iterator[FollowedModels]:
    """Tables by their width, over ``stores`` or memory; lookups wait for what is not cached."""
    tables = [ServedTable(name=name, dim=dim) for name, dim in dims.items()]
    with contextlib.ExitStack() as stack:
        below = list(stores or [stack.enter_context(MemoryStore())])
        levels = RowLevels(below, tables, back_off_seconds=0.0)
        cache = EmbeddingCache(tables, num_rows=num_rows)
        yield FollowedModels(
            stack.enter_context(LeveledLookup(cache, levels, hit_rate_threshold=2.0))
        )
