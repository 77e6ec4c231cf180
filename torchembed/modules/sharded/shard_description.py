"""Description of a sharding, as lines of text that ranks compare before they shard."""

import re

import torch
from torch import nn

from torchembed.modules.collection import Collection
from torchembed.modules.embedding import EmbeddingBag
from torchembed.modules.sharded.model_plan import single_tables
from torchembed.sharding.planning.plan import ShardingPlan
from torchembed.sharding.wire import WirePrecision, WireTransport


def describe(
    model: nn.Module, plan: ShardingPlan, wire: WirePrecision, transport: WireTransport
) -> list[str]:
    """Lines that describe the model, the plan and the wire; equal in processes that do the same."""
    lines = [
        f"torch {torch.__version__}",
        f"{plan.num_ranks} ranks on {plan.num_nodes} nodes",
        f"{wire}",
        f"{transport}",
    ]
    for path, module in model.named_modules():
        if isinstance(module, Collection):
            of = module.description
            lines.append(
                f"{path}: {type(module).__name__}, is_weighted={of.is_weighted}, "
                f"on_bad_id={of.on_bad_id.name}, output_dtype={of.output_dtype}, "
                f"gradients={of.weight_form.value}, on_meta={module.device.type == 'meta'}"
            )
            for config, table in zip(of.configs, module.table_set.tables, strict=True):
                lines.append(f"{path}: {config}, seed={table.spec.seed}")
    for path, module in single_tables(model).items():
        # Of their seeds the first rank's count.
        bags = f"{module.mode}, " if isinstance(module, EmbeddingBag) else ""
        lines.append(
            f"{path}: {type(module).__name__}, {bags}padding_idx={module.padding_idx}, "
            f"on_bad_id={module.on_bad_id.name}, sparse={module.sparse}, "
            f"on_meta={module.weight.is_meta}"
        )
    for name, parameter in model.named_parameters():
        shape, trains = tuple(parameter.shape), parameter.requires_grad
        lines.append(f"{name}: {shape}, {parameter.dtype}, requires_grad={trains}")
    for name, buffer in model.named_buffers():
        lines.append(f"{name}: a buffer of {tuple(buffer.shape)}, {buffer.dtype}")
    for table in plan.tables:
        ranks = ", ".join(str(shard.rank) for shard in table.shards)
        storage = "" if table.storage is None else f", {table.storage}"
        lines.append(f"{table.table}: {table.placement.value} on ranks {ranks}{storage}")
    # The repr of functions and of many objects holds their address, which differs among processes.
    return [re.sub(r" at 0x[0-9a-f]+", "", line) for line in lines]
