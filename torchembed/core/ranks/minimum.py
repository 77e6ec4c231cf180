"""Minima of integers over all ranks, which may be found while the host goes on, and flags."""

import array
import functools
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.core.ranks.collectives import (
    default_timeout,
    from_first_rank,
    gather_objects,
    group_of_cpu_tensors,
    rank,
    world_size,
)
from torchembed.core.ranks.node_numbers import Minima, NodeNumbers, make_file

_SPARE_NUMBERS = 24
"""How many integers a result may have besides one for each rank."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file whose text differs from node to node."""


def any_rank(flag: bool) -> bool:
    """True where ``flag`` is on some rank; every rank must call it."""
    return any_rank_each(flag)[0]


def any_rank_each(*flags: bool) -> list[bool]:
    """Each of ``flags``, true where it is on some rank; every rank must call it."""
    return [least < 0 for least in start_minimum(*(-int(flag) for flag in flags))()]


def start_minimum(*numbers: int) -> Minima:
    """Start to take the minimum of each of ``numbers`` over all ranks; every rank must call it.

    Within one node ranks show each other their numbers, over several nodes the process group
    reduces them. The first call finds out which, and waits for all ranks.

    Args:
        numbers: integers of 64 bits; at most 24 plus the number of ranks.

    Returns:
        A function that waits for the result and returns it, in any thread and as often as called.
    """
    if world_size() == 1:
        return lambda: numbers
    default = dist.group.WORLD
    assert default is not None
    if default not in _of_node:
        _of_node[default] = _open_on_all_ranks()
    of_node = _of_node[default]
    if of_node is not None:
        return of_node.start(numbers)
    # Every step does this: torch.tensor() takes six times as long, and dist.all_reduce() first asks
    # what is known here.
    least = torch.frombuffer(array.array("q", numbers), dtype=torch.int64)
    work = group_of_cpu_tensors().allreduce(least, dist.ReduceOp.MIN)
    return functools.cache(functools.partial(_waited_for, least, work))


_of_node: "weakref.WeakKeyDictionary[dist.ProcessGroup, NodeNumbers | None]"
_of_node = weakref.WeakKeyDictionary()
"""For each default process group the numbers of its ranks; None where they are on several nodes, or
the node has no shared memory."""


def _open_on_all_ranks() -> NodeNumbers | None:
    """The numbers of all ranks, or None on all of them; collective."""
    nodes = gather_objects(_BOOT_ID.read_text() if _BOOT_ID.is_file() else None)
    if None in nodes or len(set(nodes)) > 1:
        return None
    num_ranks, most_numbers = world_size(), world_size() + _SPARE_NUMBERS
    made = make_file(num_ranks, most_numbers) if rank() == 0 else None
    path = from_first_rank(None if made is None else str(made))
    try:
        opened = None
        if path is not None:
            opened = _open(Path(path), num_ranks, most_numbers)
        return opened if all(gather_objects(opened is not None)) else None
    finally:
        if made is not None:
            made.unlink()


def _open(path: Path, num_ranks: int, most_numbers: int) -> NodeNumbers | None:
    seconds = default_timeout().total_seconds()
    try:
        return NodeNumbers(path, rank(), num_ranks, most_numbers, seconds)
    except OSError:
        return None


def _waited_for(least: Tensor, work: dist.Work) -> tuple[int, ...]:
    """The integers of ``least`` once the collective ``work`` has reduced them."""
    work.wait()
    return tuple(least.tolist())
