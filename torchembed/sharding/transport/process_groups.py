"""Additional process groups of a mesh, made once and lent to one sharded model after another.

A process group keeps its threads and sockets, on a GPU a communicator, until it is destroyed. They
would add up if every sharding made its own.
"""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core import ranks
from torchembed.sharding.transport.two_level_mean import NodeGroups


class BorrowedGroups:
    """Process groups of a mesh's ranks, lent to one sharded model while this object lives.

    Attributes:
        gradients: for the dense gradients alone, which are reduced while backward exchanges
            vectors in the mesh's group.
        sizes: on the CPU, for a thread that exchanges sizes ahead of the step.
        gradient_nodes: for the dense gradients as well, in two levels; None on one node.
        size_nodes: on the CPU for that thread as well, in two levels; None on one node.
    """

    def __init__(
        self,
        gradients: dist.ProcessGroup,
        sizes: dist.ProcessGroup,
        gradient_nodes: NodeGroups | None,
        size_nodes: NodeGroups | None,
    ) -> None:
        self.gradients, self.sizes = gradients, sizes
        self.gradient_nodes, self.size_nodes = gradient_nodes, size_nodes


class BorrowedGroup:
    """A process group on the CPU of all ranks of another one, lent to one borrower while this
    object lives, for collectives of a thread of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group


@dataclasses.dataclass(kw_only=True)
class _Lendable:
    """Groups that are lent as one, and their borrower."""

    groups: tuple[dist.ProcessGroup, ...]
    borrower: "weakref.ref[BorrowedGroups | BorrowedGroup] | None" = None

    @property
    def is_free(self) -> bool:
        """True if no living borrower of this rank has it."""
        return self.borrower is None or self.borrower() is None


class _Registry:
    """The groups that were made under one default process group, and are destroyed with it."""

    def __init__(self) -> None:
        self.lendable: dict[tuple[tuple[int, ...], str], list[_Lendable]] = {}
        """Groups that are lent, by their processes and purpose, in the same order on all ranks."""
        self.parts: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        """Groups by their processes; None where this process is not one of them."""
        self.with_cpu: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        """Groups that carry CPU tensors too, by their processes and their backends."""
        self.nodes: dict[tuple[tuple[int, ...], int, str], NodeGroups] = {}
        """Groups of nodes by the processes of all, the number of nodes and the backends."""


_registries: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Registry]" = weakref.WeakKeyDictionary()
"""Registries by default process group, held weakly: they go when it is destroyed."""


def _registry() -> _Registry:
    assert dist.group.WORLD is not None
    return _registries.setdefault(dist.group.WORLD, _Registry())


def borrow_groups(mesh: DeviceMesh, num_nodes: int = 1) -> BorrowedGroups:
    """Groups of the ranks of a one-dimensional ``mesh`` that no living model uses on any of them,
    made where there are none. Collective, through the CPU.

    Args:
        num_nodes: on which the ranks are, node by node and equally many on each; of more than one,
            the mesh holds all processes.
    """
    group, processes = mesh.get_group(), tuple(mesh.mesh.tolist())
    backends = dist.get_backend_config(group)

    def make() -> tuple[dist.ProcessGroup, ...]:
        backend = None if backends == dist.get_backend_config() else backends
        made = _new_group(processes, backend), _new_group(processes, "gloo")
        if num_nodes == 1:
            return made
        levels = (_new_node_groups(processes, num_nodes, each) for each in (backend, "gloo"))
        return *made, *itertools.chain.from_iterable(levels)

    purpose = backends if num_nodes == 1 else f"{backends} on {num_nodes} nodes"
    lent = _free_or_made((processes, purpose), group, make)
    gradients, sizes, *levels = lent.groups
    nodes = (NodeGroups(*levels[:2]), NodeGroups(*levels[2:])) if levels else (None, None)
    groups = BorrowedGroups(gradients, sizes, *nodes)
    lent.borrower = weakref.ref(groups)
    return groups


def node_groups(mesh: DeviceMesh, num_nodes: int) -> NodeGroups:
    """The groups of this process in a one-dimensional ``mesh`` of all processes, which are on
    ``num_nodes`` nodes, node by node. Collective over them the first time.

    Models share them, as they share the group of the mesh: their collectives come in the order of
    the program.
    """
    processes, backends = tuple(mesh.mesh.tolist()), dist.get_backend_config(mesh.get_group())
    made, key = _registry().nodes, (processes, num_nodes, backends)
    if key not in made:
        backend = None if backends == dist.get_backend_config() else backends
        made[key] = _new_node_groups(processes, num_nodes, backend)
    return made[key]


def _new_node_groups(processes: Sequence[int], num_nodes: int, backend: str | None) -> NodeGroups:
    """New groups of the node of this process and of its place in the nodes. Collective over all
    processes, which are those of the nodes."""
    assert len(processes) == dist.get_world_size()
    assert len(processes) % num_nodes == 0
    per_node = len(processes) // num_nodes
    nodes = [list(processes[n * per_node : (n + 1) * per_node]) for n in range(num_nodes)]
    places = [list(processes[n::per_node]) for n in range(per_node)]
    mine = []
    for groups in (nodes, places):
        timeout = ranks.default_timeout()
        found, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend=backend)
        assert isinstance(found, dist.ProcessGroup)
        mine.append(found)
    return NodeGroups(*mine)


def borrow_cpu_group(group: dist.ProcessGroup) -> BorrowedGroup:
    """A group on the CPU of the ranks of ``group`` that no one else uses, made where there is none.
    Collective, through the CPU.

    Args:
        group: carries CPU tensors.
    """
    processes = tuple(dist.get_process_group_ranks(group))
    # The purpose in place of backends: no pair of a mesh is taken for such a group.
    lent = _free_or_made((processes, "a thread"), group, lambda: (_new_group(processes, "gloo"),))
    borrowed = BorrowedGroup(lent.groups[0])
    lent.borrower = weakref.ref(borrowed)
    return borrowed


def group_with_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group`` where it carries CPU tensors; else a group of its ranks that does so too, made the
    first time. Collective over them then.

    Models share it, since its collectives come in the order of the program.
    """
    backends, processes = dist.get_backend_config(group), tuple(dist.get_process_group_ranks(group))
    if "cpu:" in backends:
        return group
    made = _registry().with_cpu
    if (processes, backends) not in made:
        made[processes, backends] = _new_group(processes, f"cpu:gloo,{backends}")
    return made[processes, backends]


def _free_or_made(
    key: tuple[tuple[int, ...], str],
    group: dist.ProcessGroup,
    make: Callable[[], tuple[dist.ProcessGroup, ...]],
) -> _Lendable:
    """The first of the registry's groups under ``key`` that is free on every rank of ``group``,
    made where there is none. Collective."""
    known = _registry().lendable.setdefault(key, [])
    free = _free_on_all(known, group)
    if free is None and known:
        # Models are part of reference cycles: one that is gone may not have been collected yet.
        gc.collect()
        free = _free_on_all(known, group)
    if free is None:
        free = _Lendable(groups=make())
        known.append(free)
    return free


def _new_group(processes: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    """A new group of ``processes``, this one among them. Collective over them."""
    # By default new_group waits for all processes of the job, those outside the mesh included.
    is_part = len(processes) < dist.get_world_size()
    group = dist.new_group(
        list(processes),
        timeout=ranks.default_timeout(),
        backend=backend,
        use_local_synchronization=is_part,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _free_on_all(known: Sequence[_Lendable], group: dist.ProcessGroup) -> _Lendable | None:
    """The first of ``known`` that is free on every rank of ``group``, None without one.
    Collective."""
    if not known:
        return None
    # Ranks collect garbage at different times. A group that is free on some of them only would be
    # taken there while the others make a new one, and collectives would go to different groups.
    are_free = torch.tensor([lent.is_free for lent in known], dtype=torch.int32, device="cpu")
    dist.all_reduce(are_free, dist.ReduceOp.MIN, group=group)
    return next((lent for lent, free in zip(known, are_free.tolist(), strict=True) if free), None)


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
