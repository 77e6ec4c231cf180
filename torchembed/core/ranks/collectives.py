"""Small collectives of all ranks, apart from the model's: through the CPU, so that no device waits.

Without a process group there is one rank, and nothing is sent.
"""

import datetime
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    """This process's number in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes in the default process group; 1 without one."""
    # Every step asks, and dist.get_world_size() takes three times as long.
    group = dist.group.WORLD
    return 1 if group is None else group.size()


def is_of_some(group: dist.ProcessGroup | None) -> bool:
    """True for a group of some of all processes, which cannot take part in this module's
    collectives by themselves."""
    return group is not None and group.size() < world_size()


def default_timeout() -> datetime.timedelta:
    """Time limit of the default process group's collectives, as passed to ``init_process_group``:
    the CPU's where the group carries CPU tensors, else the device's.

    ``new_group`` does not follow it, but gives a group torch's own default unless it is passed one.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return dist.default_pg_timeout
    devices = [torch.device(name) for name in ("cpu", "cuda") if f"{name}:" in _backends()]
    return group._get_backend(devices[0]).options._timeout


def _backends() -> str:
    """Backends of the default process group by device, such as ``cpu:gloo,cuda:nccl``."""
    return dist.get_backend_config()


_cpu_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""A group that carries CPU tensors for the default process group, where that one does not."""


def make_cpu_group() -> None:
    """Make a group that carries CPU tensors, where the default process group carries none, with its
    time limit, for this module's collectives from now on; collective."""
    if dist.is_initialized() and "cpu:" not in _backends() and not _has_cpu_group():
        made, default = dist.new_group(backend="gloo", timeout=default_timeout()), dist.group.WORLD
        assert isinstance(made, dist.ProcessGroup)
        assert default is not None
        _cpu_groups.clear()
        _cpu_groups[default] = made


def _has_cpu_group() -> bool:
    """True where :func:`make_cpu_group` has made a group for the default one."""
    return dist.group.WORLD in _cpu_groups


def group_of_cpu_tensors() -> dist.ProcessGroup:
    """The process group that carries CPU tensors for the default one, which there is: that itself,
    or what :func:`make_cpu_group` has made for it."""
    default = dist.group.WORLD
    assert default is not None
    return _cpu_groups.get(default, default)


def check_cpu_backend() -> None:
    """Raise ``RuntimeError`` where the process group cannot carry CPU tensors."""
    if not dist.is_initialized() or _has_cpu_group():
        return
    if "cpu:" not in (backends := _backends()):
        raise RuntimeError(
            "the process group must carry CPU tensors as well as the device's, got the backends "
            f"{backends}; call init_process_group(backend='cpu:gloo,cuda:nccl')"
        )


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of every rank's ``values``, on the CPU in float64; every rank must call it."""
    total = values.detach().to("cpu", torch.float64)
    if world_size() > 1:
        dist.all_reduce(total, group=group_of_cpu_tensors())
    return total


def gather_objects(item: T) -> list[T]:
    """Every rank's ``item``, small and picklable, in the order of the ranks; on every rank."""
    if world_size() == 1:
        return [item]
    items = [item] * world_size()
    dist.all_gather_object(items, item, group=group_of_cpu_tensors())
    return items


def from_first_rank(item: T) -> T:
    """Rank 0's ``item``, small and picklable, on every rank."""
    items = [item]
    if world_size() > 1:
        dist.broadcast_object_list(items, src=0, group=group_of_cpu_tensors())
    return items[0]


def gather_on_first_rank(rows: Tensor) -> Tensor | None:
    """Every rank's ``rows [n, ...]`` one after the other, on rank 0; None on the others.

    The number of rows may differ between ranks, dtype and the other sizes may not. CPU tensors.
    """
    if world_size() == 1:
        return rows
    counts = gather_objects(len(rows))
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts] if rank() == 0 else None
    dist.gather(padded, parts, group=group_of_cpu_tensors())
    if parts is None:
        return None
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
