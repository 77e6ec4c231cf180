"""Rows that are divided over ranks, as a ``DTensor`` for distributed checkpoints.

DTensor is imported where it is used: it takes longer to import than all of torchembed.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchembed.sharding.planning.partition import HashPartition
from torchembed.tables import Table

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def global_tensor(local: Tensor, *, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    """A ``DTensor`` over ``mesh`` of which ``local`` is this rank's part along ``dim``.

    Its length along ``dim`` is ``size``. The split is that of
    :func:`~torchembed.sharding.planning.plan.place_table`, which is DTensor's own, over the ranks
    that hold a part. Shares memory with ``local``; nothing is communicated. A tensor without that
    dimension, such as one number for each row of a table whose columns are divided, is whole on
    every rank and is returned unchanged.
    """
    from torch.distributed.tensor import DTensor, Shard

    if local.dim() <= dim:
        return local
    shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
    # DTensor is told the whole shape and stride: it would otherwise take all parts to be as long as
    # this one, while the last may be shorter.
    whole = local.new_empty(shape, device="meta")
    if not local.is_meta:
        mesh = mesh_on(mesh, local.device.type)
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def mesh_on(mesh: DeviceMesh, device_type: str) -> DeviceMesh:
    """A mesh of the ranks of ``mesh``, which has one dimension, for tensors on ``device_type``.

    A ``DTensor`` of rows in host memory has one of its own, since DTensor would copy them to the
    GPU. It shares the process group, so that ``full_tensor()`` of rows in host memory needs one
    that has a backend for the CPU, too.
    """
    if mesh.device_type == device_type:
        return mesh
    return DeviceMesh.from_group(mesh.get_group(), device_type)


def stacked_tensor(local: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """A ``DTensor`` over ``mesh`` of which each rank holds an equal part along the first dimension,
    ``local`` on this one, as of dynamic tables whose ids are divided. Nothing is communicated."""
    return global_tensor(local, mesh=mesh, dim=0, size=len(local) * mesh.size())


def are_here(table: Table, keys: Tensor) -> Tensor:
    """bool ``[n]``: which of ``keys``, int64 ``[n]``, belong to the rows that this rank holds of a
    table, or are ids that its part of a dynamic one is for."""
    place, num_shares = table.id_share
    if table.spec.num_ids is not None:
        return (keys >= table.first_row) & (keys < table.first_row + table.num_rows)
    if num_shares == 1:
        return torch.ones_like(keys, dtype=torch.bool)
    return HashPartition(ranks=tuple(range(num_shares))).places_of(keys) == place


def local_part(tensor: Tensor, table: Table) -> Tensor:
    """The part of a whole table, or of a ``DTensor`` with this model's placement, that ``table``
    holds.

    A tensor of another shape than the whole table's and the part's is returned unchanged.

    Raises:
        ValueError: for a ``DTensor`` with another placement, for another tensor with the shape of
            a part of a static table, or for the whole rows of a dynamic table whose ids are
            divided.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        own = table.as_global(table.parameter.data if tensor.dim() == 2 else tensor.to_local())
        what, way = f"weight of table {table.spec.name}", "call its full_tensor(), or load through"
        return _local_of(tensor, own, what, f"{way} torch.distributed.checkpoint")
    if tuple(tensor.shape) == (table.spec.num_rows, table.spec.dim):
        if table.spec.num_ids is None and table.num_rows != table.spec.num_rows:
            raise ValueError(
                f"weight of dynamic table {table.spec.name} must be a DTensor of this model, since "
                "its ids are divided over ranks, got the rows of a whole table; load a state dict "
                "of a model that is sharded alike"
            )
        rows = tensor[table.first_row : table.first_row + table.num_rows]
        return rows[:, table.first_column : table.first_column + table.num_columns]
    is_part = tuple(tensor.shape) == (table.num_rows, table.num_columns)
    if is_part and table.spec.num_ids is not None:  # else ids tell whose rows they are
        # Each rank would take the rows of a smaller table for its own.
        raise ValueError(
            f"weight of table {table.spec.name} must be whole, of shape "
            f"{[table.spec.num_rows, table.spec.dim]}, or a DTensor as in this model, got a tensor "
            f"of shape {list(tensor.shape)}, as a rank's part has; copy parts into the parameter"
        )
    return tensor


def local_contents(tensor: Tensor, table: Table) -> Tensor:
    """The part of one of the tensors of a dynamic table's ``index_contents`` that this rank holds,
    of a ``DTensor`` with this model's placement; another tensor is returned unchanged.

    Raises:
        ValueError: for a ``DTensor`` with another placement.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    own = table.contents_as_global(tensor.to_local())
    way = "load a state dict of a model that is sharded alike"
    return _local_of(tensor, own, f"ids of dynamic table {table.spec.name}", way)


def _local_of(tensor: "DTensor", own: Tensor, what: str, way_out: str) -> Tensor:
    """This rank's part of ``tensor``, which must be placed as this model's ``own`` is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(own, DTensor) or (
        (tensor.placements, tensor.device_mesh.mesh.tolist())
        != (own.placements, own.device_mesh.mesh.tolist())
    ):
        raise ValueError(
            f"{what} must be placed as in this model, or whole, got a DTensor with "
            f"{tensor.placements} over ranks {tensor.device_mesh.mesh.tolist()}; {way_out}"
        )
    return tensor.to_local()
