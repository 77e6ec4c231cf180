"""This rank's shard of a table."""

import dataclasses
import functools

from torchembed.sharding.planning.plan import Placement, TablePlan
from torchembed.sharding.transport.data_parallel import sum_over_columns
from torchembed.sharding.transport.global_rows import global_tensor, stacked_tensor
from torchembed.sharding.transport.table_ranks import TableRanks
from torchembed.tables import IdShare, Table, TableSpec


def local_table(spec: TableSpec, plan: TablePlan, ranks: TableRanks) -> Table | None:
    """This rank's shard of a table, in the storage that ``plan`` names; None where it has none."""
    shard = next((shard for shard in plan.shards if shard.rank == ranks.rank), None)
    if shard is None:
        return None
    table = Table(
        dataclasses.replace(spec, storage=plan.storage),
        first_row=shard.first_row,
        num_rows=shard.num_rows,
        first_column=shard.first_column,
        num_columns=shard.num_columns,
    )
    table.max_over_holders = ranks.max_over_holders
    table.is_sharded = plan.placement is not Placement.DATA_PARALLEL
    if not table.is_sharded:
        table.gradient_reduction = ranks.row_gradient_mean
    elif plan.placement.is_divided:
        by_columns = plan.placement is Placement.COLUMN_WISE
        mesh = ranks.holders(plan)
        if plan.takes_any_id and not by_columns:
            table.as_global = functools.partial(stacked_tensor, mesh=mesh)
            # The ranks of columns all hold the same ids.
            table.contents_as_global = table.as_global
            holders = [shard.rank for shard in plan.shards]
            table.id_share = IdShare(holders.index(ranks.rank), len(holders))
        else:
            table.as_global = functools.partial(
                global_tensor,
                mesh=mesh,
                dim=1 if by_columns else 0,
                size=spec.dim if by_columns else spec.num_rows,
            )
        if by_columns and mesh.size() > 1:
            table.sum_over_columns = sum_over_columns(mesh.get_group())
    return table
