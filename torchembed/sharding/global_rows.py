"""Rows that are spread over ranks, as one tensor for distributed checkpoints.

DTensor is imported where it is used: it takes longer to import than all of torchembed.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def row_wise_tensor(local: Tensor, *, mesh: DeviceMesh, num_rows: int) -> Tensor:
    """``local [rows of this rank, ...]`` as part of a ``DTensor [num_rows, ...]`` over ``mesh``.

    The split is that of ``Placement.ROW_WISE``, which is DTensor's own. Shares memory with
    ``local``; nothing is communicated.
    """
    from torch.distributed.tensor import DTensor, Shard

    whole = local.new_empty((num_rows, *local.shape[1:]), device="meta")
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def local_rows(tensor: Tensor, *, first_row: int, num_rows: int, whole_rows: int) -> Tensor:
    """This rank's ``num_rows`` rows from ``first_row`` on, of a ``DTensor`` or a whole table.

    A tensor of neither shape comes back as it is.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if tensor.shape[0] == whole_rows:
        return tensor[first_row : first_row + num_rows]
    return tensor
