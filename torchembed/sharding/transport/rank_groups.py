"""Process groups beside that of a mesh: made once, and lent to one sharded model after another.

A process group holds threads and sockets, on a GPU a communicator, for as long as the process has
it: what each sharding made anew would add up.
"""

import dataclasses
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchembed.core import ranks


class RankGroups:
    """Two process groups of a mesh's ranks, of one sharded model as long as this object lives.

    Attributes:
        gradients: for the dense gradients alone, which are reduced while backward exchanges
            vectors in the mesh's group.
        sizes: through the CPU, for a thread that announces ids ahead.
    """

    def __init__(self, gradients: dist.ProcessGroup, sizes: dist.ProcessGroup) -> None:
        self.gradients, self.sizes = gradients, sizes


@dataclasses.dataclass(kw_only=True)
class _Made:
    """A pair of groups, and whoever has it."""

    gradients: dist.ProcessGroup
    sizes: dist.ProcessGroup
    lent: "weakref.ref[RankGroups] | None" = None

    @property
    def is_free(self) -> bool:
        """Whether the model that had it on this rank is gone."""
        return self.lent is None or self.lent() is None


class _Registry:
    """The groups that were made beside one default process group, with which they end."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[tuple[int, ...], str], list[_Made]] = {}
        """By the processes and backends of a mesh; in one order on all of its ranks."""
        self.parts: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        """By the processes; None where this one is none of them."""


_registries: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Registry]" = weakref.WeakKeyDictionary()
"""By the default process group: what belongs to one that was destroyed goes with it."""


def _registry() -> _Registry:
    assert dist.group.WORLD is not None
    return _registries.setdefault(dist.group.WORLD, _Registry())


def borrow_groups(mesh: DeviceMesh) -> RankGroups:
    """Groups of the ranks of a one-dimensional ``mesh`` that no living model has on any of them;
    made where there are none. Collective, through the CPU."""
    group, processes = mesh.get_group(), tuple(mesh.mesh.tolist())
    backends = dist.get_backend_config(group)
    pairs = _registry().pairs.setdefault((processes, backends), [])
    pair = _free_on_all(pairs, group)
    if pair is None and pairs:
        # Models are in reference cycles: one that is gone may not have been collected yet.
        gc.collect()
        pair = _free_on_all(pairs, group)
    if pair is None:
        of_default = backends == dist.get_backend_config()
        gradients = _new_group(processes, None if of_default else backends)
        pair = _Made(gradients=gradients, sizes=_new_group(processes, "gloo"))
        pairs.append(pair)
    groups = RankGroups(pair.gradients, pair.sizes)
    pair.lent = weakref.ref(groups)
    return groups


def _new_group(processes: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    """A group of ``processes``, this one among them; these make it together, or all there are."""
    is_part = len(processes) < dist.get_world_size()
    group = dist.new_group(
        list(processes),
        timeout=ranks.default_timeout(),
        backend=backend,
        use_local_synchronization=is_part,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _free_on_all(pairs: Sequence[_Made], group: Any) -> _Made | None:
    """The first of ``pairs`` that is free on every rank of ``group``; where garbage is collected is
    each rank's own affair."""
    if not pairs:
        return None
    are_free = torch.tensor([pair.is_free for pair in pairs], dtype=torch.int32, device="cpu")
    dist.all_reduce(are_free, dist.ReduceOp.MIN, group=group)
    return next((pair for pair, free in zip(pairs, are_free.tolist(), strict=True) if free), None)


def group_of_some(processes: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of some of all processes, None on the others; collective over all processes where
    it is asked for the first time. Its collectives come in the order of the program, so that
    models share it."""
    parts, key = _registry().parts, tuple(processes)
    if key not in parts:
        group = dist.new_group(list(processes), timeout=ranks.default_timeout())
        parts[key] = group if isinstance(group, dist.ProcessGroup) else None
    return parts[key]
