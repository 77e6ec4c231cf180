"""What the ranks tell each other beside the model: through the CPU, so that no device waits.

Without a process group there is one rank, and nothing is sent.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


_made: list[Any] = []
"""The default process group that carries no CPU tensors, and the group made beside it."""


def make_cpu_group() -> None:
    """Where the process group carries no CPU tensors, make one beside it that does, for what ranks
    tell each other from now on; collective."""
    if dist.is_initialized() and "cpu:" not in dist.get_backend_config() and _group() is None:
        _made[:] = dist.group.WORLD, dist.new_group(backend="gloo")


def _group() -> Any:
    """For CPU tensors; None for the default one."""
    return _made[1] if _made and _made[0] is dist.group.WORLD else None


def check_cpu_backend() -> None:
    """Raise ``RuntimeError`` where the process group cannot carry CPU tensors."""
    if not dist.is_initialized() or _group() is not None:
        return
    if "cpu:" not in (backends := dist.get_backend_config()):
        raise RuntimeError(
            "the process group must carry CPU tensors beside the device's, got the backends "
            f"{backends}; call init_process_group(backend='cpu:gloo,cuda:nccl')"
        )


def any_rank(flag: bool) -> bool:
    """True where ``flag`` is on some rank; every rank must call it."""
    return any_rank_each(flag)[0]


def any_rank_each(*flags: bool) -> list[bool]:
    """For each of ``flags`` whether it is true on some rank, by one collective of all ranks."""
    if world_size() == 1:
        return list(flags)
    numbers = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=_group())
    return [bool(number) for number in numbers.tolist()]


def start_minimum(*numbers: int) -> Callable[[], tuple[int, ...]]:
    """Begin to find out the least of each of ``numbers`` over all ranks, which calls of the result
    say, in any thread; every rank must call it."""
    if world_size() == 1:
        return lambda: numbers
    least = torch.tensor(numbers, dtype=torch.int64)
    work = dist.all_reduce(least, dist.ReduceOp.MIN, group=_group(), async_op=True)

    @functools.cache
    def finish() -> tuple[int, ...]:
        if work is not None:
            work.wait()
        return tuple(least.tolist())

    return finish


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of every rank's ``values``, on the CPU in float64; every rank must call it."""
    total = values.detach().to("cpu", torch.float64)
    if world_size() > 1:
        dist.all_reduce(total, group=_group())
    return total


def gather_objects(item: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``item``, small and picklable, in the order of the ranks; on every rank."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item, group=_group() if group is None else group)
    return items


def from_first_rank(item: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's ``item``, small and picklable, on every rank."""
    items = [item]
    if world_size() > 1:
        dist.broadcast_object_list(items, src=0, group=_group() if group is None else group)
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
    dist.gather(padded, parts, group=_group())
    if parts is None:
        return None
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
