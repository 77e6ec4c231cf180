"""One lookup, and one update, for the tables of all of a module's placements on a rank.

TorchRec has a kernel for each kind of placement. They stay, as what plans, optimizers and
checkpoints know; where they differ in their tables alone, these are kept in one memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.core.types import OptimizerKind
from torchembed.integrations.torchrec.kernels import look_up, tables_of_all
from torchembed.integrations.torchrec.lookups import PooledLookup, pooled_lookup_of
from torchembed.integrations.torchrec.settings import output_dtype, update_settings
from torchembed.integrations.torchrec.shared_rows import Rows
from torchembed.integrations.torchrec.tables import FusedTables
from torchembed.integrations.torchrec.versions import grouped_configs, lookup_arguments


class UnitedLookup:
    """Makes the lookups of all ``shardings``, and looks up in all at once.

    Args:
        shardings: of a module, for which :func:`may_unite` holds.
    """

    def __init__(self, shardings: Sequence[Any]) -> None:
        arguments = [lookup_arguments(sharding) for sharding in shardings]
        self.device: torch.device = arguments[0].device
        configs = [config for of_one in arguments for config in of_one.grouped_configs]
        # A rank may hold no tables.
        self._tables = tables_of_all(configs, self.device) if configs else None
        memory = self._memory([len(config.embedding_tables) for config in configs])
        self.lookups: list[PooledLookup] = [pooled_lookup_of(s, memory) for s in shardings]
        kernels: list[Any] = [kernel for lookup in self.lookups for kernel in lookup._emb_modules]
        self._parts: list[FusedTables] = [kernel._emb_module for kernel in kernels]
        if self._tables is not None:
            self._tables.hyper_parameters = self._parts[0].hyper_parameters

    def _memory(self, counts: Sequence[int]) -> Iterator[Rows]:
        """Of the tables of each kernel."""
        assert self._tables is not None
        number = 0
        for count in counts:
            yield self._tables.part(number, count)
            number += count

    def is_one(self) -> bool:
        """Whether tables of all placements still change in the same way, unseen by trackers."""
        if any(lookup.optim_state_tracker_fn is not None for lookup in self.lookups):
            return False
        now = [part.hyper_parameters for part in self._parts]
        return all(part == now[0] for part in now[1:])

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Vectors ``[B, columns]`` of all features, those of each lookup in turn."""
        if self._tables is None:
            return self.lookups[0](features)  # gives no columns, and takes their gradients
        return look_up(self._tables, features, weighted=False)


def may_unite(shardings: Sequence[Any]) -> bool:
    """Whether there are several kernels that differ in their tables alone. The same on every rank.

    What counts steps is not united, since each kernel counts its own.
    """
    configs = grouped_configs(shardings)
    kinds = {
        (
            config.data_type,
            config.pooling,
            config.is_weighted,
            config.compute_kernel,
            output_dtype(config.fused_params or {}),
            update_settings(config.fused_params or {}),
        )
        for config in configs
    }
    widths = {table.local_cols for config in configs for table in config.embedding_tables}
    if len(shardings) == 1 or len(kinds) != 1 or len(widths) != 1:
        return False
    _, pooling, is_weighted, compute_kernel, _, settings = kinds.pop()
    is_rounded = settings.stochastic_rounding and configs[0].data_type is not DataType.FP32
    return (
        pooling is PoolingType.SUM
        and not is_weighted
        and compute_kernel is EmbeddingComputeKernel.FUSED
        and settings.rule.kind is not OptimizerKind.ADAM
        and not is_rounded
    )
