"""One lookup, and one update, for this rank's tables of all sharding types of a module.

TorchRec has a kernel for each sharding type. The kernels stay, since plans, optimizers and
checkpoints refer to them; where they differ in their tables alone, the tables share one memory.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchembed.core.types import OptimizerKind
from torchembed.integrations.torchrec.kernels import combined_tables, look_up
from torchembed.integrations.torchrec.lookups import PooledLookup, make_pooled_lookup
from torchembed.integrations.torchrec.settings import output_dtype, update_settings
from torchembed.integrations.torchrec.table_memory import TableMemory
from torchembed.integrations.torchrec.tables import FusedTables
from torchembed.integrations.torchrec.versions import Sharding, grouped_configs, lookup_arguments


class CombinedLookup:
    """Makes the lookups of all shardings of a module over one memory, and looks up in all at once.

    Args:
        shardings: those of the module, for which :func:`can_combine` holds.
    """

    def __init__(self, shardings: Sequence[Sharding]) -> None:
        arguments = [lookup_arguments(sharding) for sharding in shardings]
        self.device = arguments[0].device or torch.device("cpu")
        configs = [config for of_one in arguments for config in of_one.grouped_configs]
        # A rank may hold no tables.
        self._tables = combined_tables(configs, self.device) if configs else None
        memory = self._table_memory([len(config.embedding_tables) for config in configs])
        self.lookups: list[PooledLookup] = [make_pooled_lookup(s, memory) for s in shardings]
        kernels = (kernel for lookup in self.lookups for kernel in lookup.kernels)
        # can_combine holds for fused kernels alone.
        self._of_kernels = [cast("FusedTables", kernel.tables) for kernel in kernels]
        if self._tables is not None:
            self._tables.hyper_parameters = self._of_kernels[0].hyper_parameters

    def _table_memory(self, counts: Sequence[int]) -> Iterator[TableMemory]:
        """Yield the memory of each kernel's tables, of which there are ``counts``."""
        assert self._tables is not None
        first = 0
        for count in counts:
            yield self._tables.memory_of(first, count)
            first += count

    def is_uniform(self) -> bool:
        """True where the tables of all kernels are still updated by equal rules and rates, and no
        tracker watches a single kernel; otherwise each kernel must look up for itself."""
        if any(lookup.optim_state_tracker_fn is not None for lookup in self.lookups):
            return False
        now = [tables.hyper_parameters for tables in self._of_kernels]
        return all(other == now[0] for other in now[1:])

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Vectors ``[B, columns]`` of all features, lookup after lookup."""
        if self._tables is None:
            return self.lookups[0](features)  # gives no columns, and takes their gradients
        return look_up(self._tables, features, weighted=False)


def can_combine(shardings: Sequence[Sharding]) -> bool:
    """True where there are several kernels that differ in their tables alone. The same on every
    rank.

    Kernels that count steps are not combined, since each counts its own.
    """
    configs = grouped_configs(shardings)
    kinds = {
        (
            config.data_type,
            config.pooling,
            config.is_weighted,
            config.compute_kernel,
            output_dtype(config),
            update_settings(config),
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
