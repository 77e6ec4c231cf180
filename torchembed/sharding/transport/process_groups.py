"""Additional process groups of a mesh, made once and lent to one sharded model after another.

A process group keeps its threads and sockets, on a GPU a communicator, until it is destroyed. They
would add up if every sharding made its own.
"""

import dataclasses
import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core import ranks


class BorrowedGroups:
    """Two process groups of a mesh's ranks, lent to one sharded model while this object lives.

    Attributes:
        gradients: for the dense gradients alone, which are reduced while backward exchanges
            vectors in the mesh's group.
        sizes: on the CPU, for a thread that exchanges sizes ahead of the step.
    """

    def __init__(self, gradients: dist.ProcessGroup, sizes: dist.ProcessGroup) -> None:
        self.gradients, self.sizes = gradients, sizes


@dataclasses.dataclass(kw_only=True)
class _GroupPair:
    """The groups that are lent together, and their borrower."""

    gradients: dist.ProcessGroup
    sizes: dist.ProcessGroup
    borrower: "weakref.ref[BorrowedGroups] | None" = None

    @property
    def is_free(self) -> bool:
        """True if no living model of this rank has it."""
        return self.borrower is None or self.borrower() is None


class _Registry:
    """The groups that were made under one default process group, and are destroyed with it."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[tuple[int, ...], str], list[_GroupPair]] = {}
        """Pairs by the processes and backends of a mesh, in the same order on all of its ranks."""
        self.parts: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        """Groups by their processes; None where this process is not one of them."""


_registries: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Registry]" = weakref.WeakKeyDictionary()
"""Registries by default process group, held weakly: they go when it is destroyed."""


def _registry() -> _Registry:
    assert dist.group.WORLD is not None
    return _registries.setdefault(dist.group.WORLD, _Registry())


def borrow_groups(mesh: DeviceMesh) -> BorrowedGroups:
    """Groups of the ranks of a one-dimensional ``mesh`` that no living model uses on any of them,
    made where there are none. Collective, through the CPU."""
    group, processes = mesh.get_group(), tuple(mesh.mesh.tolist())
    backends = dist.get_backend_config(group)
    pairs = _registry().pairs.setdefault((processes, backends), [])
    pair = _free_on_all(pairs, group)
    if pair is None and pairs:
        # Models are part of reference cycles: one that is gone may not have been collected yet.
        gc.collect()
        pair = _free_on_all(pairs, group)
    if pair is None:
        of_default = backends == dist.get_backend_config()
        gradients = _new_group(processes, None if of_default else backends)
        pair = _GroupPair(gradients=gradients, sizes=_new_group(processes, "gloo"))
        pairs.append(pair)
    groups = BorrowedGroups(pair.gradients, pair.sizes)
    pair.borrower = weakref.ref(groups)
    return groups


def _new_group(processes: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    """A new group of ``processes``, this one among them. Collective over them."""
    is_part = len(processes) < dist.get_world_size()
    group = dist.new_group(
        list(processes),
        timeout=ranks.default_timeout(),
        backend=backend,
        use_local_synchronization=is_part,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _free_on_all(pairs: Sequence[_GroupPair], group: dist.ProcessGroup) -> _GroupPair | None:
    """The first of ``pairs`` that is free on every rank of ``group``, None without one.
    Collective."""
    if not pairs:
        return None
    # Ranks collect garbage at different times, so that a pair may be free on some of them only.
    are_free = torch.tensor([pair.is_free for pair in pairs], dtype=torch.int32, device="cpu")
    dist.all_reduce(are_free, dist.ReduceOp.MIN, group=group)
    return next((pair for pair, free in zip(pairs, are_free.tolist(), strict=True) if free), None)


def subgroup(processes: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of some processes, None on the others. Collective over all processes the first
    time.

    Models share it, since its collectives come in the order of the program.
    """
    parts, key = _registry().parts, tuple(processes)
    if key not in parts:
        group = dist.new_group(list(processes), timeout=ranks.default_timeout())
        parts[key] = group if isinstance(group, dist.ProcessGroup) else None
    return parts[key]
