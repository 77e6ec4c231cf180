"""Checks that a transport can be used: which GPUs can store into each other's memory."""

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchembed.sharding.wire import WirePrecision, WireTransport, check_wire


def check_transport(
    transport: WireTransport, wire: WirePrecision, mesh: DeviceMesh, num_nodes: int
) -> None:
    """Raise where ``transport`` cannot be used on ``mesh``, as far as all ranks know it alike.

    Raises:
        TypeError: for something other than a ``WireTransport``.
        ValueError: for a mesh of several nodes, or not of GPUs, and for a ``wire`` that it cannot
            send in.
    """
    if not isinstance(transport, WireTransport):
        raise TypeError(f"transport must be a WireTransport, got {transport!r}")
    if transport is WireTransport.COLLECTIVE:
        return
    check_wire(wire, transport)
    if mesh.device_type != "cuda":
        raise ValueError(
            f"transport must be WireTransport.COLLECTIVE on {mesh.device_type}, got {transport}; "
            "only GPUs store into each other's memory"
        )
    if num_nodes > 1:
        raise ValueError(
            f"transport must be WireTransport.COLLECTIVE on {num_nodes} nodes, got {transport}; "
            "GPUs store into each other's memory within one"
        )


def check_peer_access(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise on every rank of ``group`` where the GPU of one cannot store into that of another.

    Collective.

    Raises:
        ValueError: names the rank, and the reason.
    """
    mine = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    of_ranks = [mine] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, mine, group)
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    problem = peer_problem(of_ranks, dist.get_rank(group))
    for rank, (_, uuid) in enumerate(of_ranks):
        # A GPU that CUDA_VISIBLE_DEVICES hides from this process cannot be asked about here: making
        # symmetric memory fails where there is no access.
        other = visible.get(uuid, device.index)
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            problem = problem or f"its GPU has no peer access to rank {rank}'s"
    # Gathered, so that all ranks raise the same and none goes on to a collective alone.
    problems = [problem] * len(of_ranks)
    dist.all_gather_object(problems, problem, group)
    for rank, found in enumerate(problems):
        if found is not None:
            raise ValueError(
                f"transport of rank {rank} must be WireTransport.COLLECTIVE, got "
                f"{WireTransport.PUSH}: {found}"
            )


def peer_problem(of_ranks: Sequence[tuple[str, str]], rank: int) -> str | None:
    """The reason for which ``rank`` cannot store into others' memory, from each rank's host and the
    UUID of its GPU; None where these allow it."""
    host, uuid = of_ranks[rank]
    for other, (other_host, other_uuid) in enumerate(of_ranks):
        if other_host != host:
            return f"rank {other} is on {other_host} and not on {host}"
        if other != rank and other_uuid == uuid:
            return f"rank {other} uses the same GPU"
    return None
