"""The ids that dynamic tables hold, in the state dicts of TorchRec's sharded collections.

Beside ``<table>.weight`` stand ``<table>.index.ids`` and so on, as in torchembed's own modules.
Where a hash divides the ids over ranks they are sharded as the weight's rows are; else the ranks
that hold the table, or columns of it, all have the same whole tensors.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from torchembed.core.own_storage import with_own_storage
from torchembed.integrations.torchrec.plans.dynamic_tables import BY_ROW
from torchembed.modules.index_in_state_dict import CheckedIndex, check_index, load_index
from torchembed.sharding.transport.global_rows import stacked_tensor
from torchembed.tables import Table


class IndexedTables(NamedTuple):
    """The dynamic tables of a sharded collection that this rank holds."""

    container: str
    """The attribute that holds the tables' weights."""
    tables: Mapping[str, list[Table]]
    """The tables by name; several of one name are columns of it."""
    plans: Mapping[str, ParameterSharding]
    env: ShardingEnv

    def as_saved(self, name: str, tensor: Tensor) -> Tensor | ShardedTensor:
        """This rank's part of a tensor of table ``name`` in the form of state dicts."""
        plan = self.plans[name]
        if plan.sharding_type not in BY_ROW:
            return with_own_storage(tensor)
        if self.env.output_dtensor and plan.sharding_type == ShardingType.ROW_WISE.value:
            assert self.env.device_mesh is not None
            return stacked_tensor(tensor, mesh=self.env.device_mesh)
        return _sharded_tensor(tensor, plan, self.env.process_group)


def _sharded_tensor(
    local: Tensor, plan: ParameterSharding, group: dist.ProcessGroup | None
) -> ShardedTensor:
    """``local``, as long on every rank that holds rows, as one tensor over these ranks."""
    parts = cast("EnumerableShardingSpec", plan.sharding_spec).shards
    length, rest = len(local), list(local.shape[1:])
    spec = EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[number * length, *(0 for _ in rest)],
                shard_sizes=[length, *rest],
                placement=part.placement,
            )
            for number, part in enumerate(parts)
        ]
    )
    properties = TensorProperties(dtype=local.dtype)
    metadata = spec.build_metadata(torch.Size([len(parts) * length, *rest]), properties)
    rank = dist.get_rank(group)
    mine = [Shard(local, part) for part in metadata.shards_metadata if _rank_of(part) == rank]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, sharded_tensor_metadata=metadata, process_group=group
    )


def _rank_of(shard: ShardMetadata) -> int | None:
    assert shard.placement is not None
    return shard.placement.rank()


def _local(value: Any) -> Tensor:
    """This rank's part of a tensor of a state dict."""
    if isinstance(value, ShardedTensor):
        (shard,) = value.local_shards()
        return shard.tensor
    return value.to_local() if isinstance(value, DTensor) else value


def keep_in_state(module: nn.Module, indexed: IndexedTables) -> None:
    """Let state dicts of a sharded ``module`` hold which ids its dynamic tables hold, and loading
    one give the ids their rows again."""

    def save(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, tables in indexed.tables.items():
            for key, tensor in tables[0].index_contents().items():
                full = f"{prefix}{indexed.container}.{name}.index.{key}"
                state[full] = indexed.as_saved(name, tensor)

    def load(
        _: nn.Module, state: dict[str, Any], prefix: str, __: Any, strict: bool, *reports: Any
    ) -> None:
        checked: list[tuple[list[Table], CheckedIndex]] = []
        for name in indexed.plans:
            of_table = f"{prefix}{indexed.container}.{name}."
            keys = [key for key in state if key.startswith(f"{of_table}index.")]
            given = {key: state.pop(key) for key in keys}
            tables = indexed.tables.get(name, [])
            if not tables:
                continue
            of_rank = {key: _local(value) for key, value in given.items()}
            weight = f"{of_table}weight"
            if weight in state:
                of_rank[weight] = tables[0].parameter
            checked.append((tables, check_index(tables[0], of_rank, of_table)))
        errors = [error for _, index in checked for error in index.errors]
        if errors:  # before TorchRec loads the weights
            raise RuntimeError("\n".join(errors))
        for tables, index in checked:
            load_index(tables[0], index, strict, *reports)
            for table in tables[1:]:
                table.load_index_contents(tables[0].index_contents())

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)
