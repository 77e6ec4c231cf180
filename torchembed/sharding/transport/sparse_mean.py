"""The mean of sparse gradients over ranks, as those of ``torch.nn.Embedding(sparse=True)``."""

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.sharding.transport.finished_work import wait_for


def average_sparse_gradient(parameter: Tensor, group: dist.ProcessGroup) -> None:
    """Make ``parameter.grad`` the mean over the ranks of ``group``: a coalesced sparse gradient of
    the rows that any of them has touched, summed in the order of ranks.

    Collective; a rank without a gradient counts as zeros. The host waits for a GPU, since ranks
    touch different numbers of rows, so that no CUDA graph can hold it.

    Args:
        parameter: ``[R, ...]``, with a gradient that is sparse in its first dimension.
    """
    rows, values = _touched(parameter)
    sizes = torch.cat(_gathered(rows.new_tensor([rows.numel()]), group)).tolist()
    # Every rank sends as much as the one that sends most.
    spare = max(sizes) - rows.numel()
    rows = torch.cat([rows, rows.new_zeros(spare)])
    values = torch.cat([values, values.new_zeros(spare, *values.shape[1:])])
    of_ranks = zip(_gathered(rows, group), _gathered(values, group), sizes, strict=True)
    parts = [(r[:size], v[:size]) for r, v, size in of_ranks]
    all_values = torch.cat([part for _, part in parts]) / len(sizes)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        indices = torch.cat([part for part, _ in parts]).unsqueeze(0)
        mean = torch.sparse_coo_tensor(indices, all_values, parameter.shape)
    parameter.grad = mean.coalesce()


def _touched(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with a gradient on this rank, int64 ``[n]``, and their gradients."""
    grad = parameter.grad
    if grad is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return rows, parameter.detach()[:0]
    if not grad.is_sparse:  # of a use that is no lookup
        grad = grad.to_sparse(1)
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """``tensor`` of each rank, all of one shape."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, tensor.contiguous(), group=group, async_op=True)
    if tensor.is_cuda:
        work.wait()  # type: ignore[union-attr]
    else:
        wait_for(work)
    return parts
