"""The processes of a run."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipes.launch import check_restarts
from torchembed import plan_embeddings, shard_embeddings
from torchembed.core.ranks import gather_objects, world_size
from torchembed.core.ranks.process_exit import exit_process_with_parent
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.optim import FusedOptimizer
from torchembed.sharding import Placement, Planner, WirePrecision
from torchembed.training import stay_near


@contextlib.contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """Join the other processes that ``torchrun`` started, or run alone; gives this one's device.

    Where there are GPUs, each process gets one of its own, and processors near it. Collectives go
    through NCCL for tensors on GPUs and through gloo for those on the CPU.

    Raises:
        RuntimeError: where a machine has GPUs, but fewer than processes, or ``torchrun`` is to
            start processes again and could not.
    """
    check_restarts()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < num_gpus < num_local_ranks:
        raise RuntimeError(
            f"{num_local_ranks} processes need as many GPUs, and this machine has {num_gpus}; "
            f"start {num_gpus}, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cpu")
    if num_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        stay_near(device)
    if not dist.is_torchelastic_launched():
        yield device
        return
    # torchrun, once killed, cannot end its ranks, which would train on beside the resumed run.
    exit_process_with_parent()
    dist.init_process_group("cpu:gloo,cuda:nccl" if num_gpus else "gloo")
    yield device
    # Not after an error: it would wait for ranks that are gone, and torchrun ends all of them.
    dist.destroy_process_group()


def check_batch_size(batch_size: int, num_ranks: int | None = None) -> None:
    """Raise ``ValueError`` where ranks, those of this run by default, cannot divide a batch
    evenly."""
    num_ranks = num_ranks or world_size()
    if batch_size % num_ranks:
        raise ValueError(
            f"batch_size must be a multiple of the {num_ranks} ranks, got {batch_size}; change "
            "--batch-size or the number of ranks"
        )


def num_nodes() -> int:
    """Number of nodes of a run of ``torchrun``, which numbers its ranks node by node; 1 where nodes
    have different numbers of ranks. Collective."""
    num_ranks = world_size()
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))
    # Where this differs, not all ranks could take part in the same groups of a node.
    if set(gather_objects(of_node)) != {of_node}:
        return 1
    return num_ranks // of_node


def rank_mesh(device: torch.device) -> DeviceMesh:
    """All ranks, on several nodes in two dimensions: nodes, and ranks in a node. Collective."""
    nodes, num_ranks = num_nodes(), world_size()
    shape = (num_ranks,) if nodes == 1 else (nodes, num_ranks // nodes)
    return init_device_mesh(device.type, shape)


def table_device(device: torch.device) -> torch.device:
    """Device to make a model's tables on, so that :func:`shard_over_ranks` makes no table whole."""
    return torch.device("meta") if dist.is_initialized() else device


def shard_over_ranks(
    model: nn.Module,
    device: torch.device,
    optimizer: type[FusedOptimizer],
    placement: Placement | None = None,
    planner: Planner | None = None,
    wire: WirePrecision | None = None,
) -> nn.Module:
    """Spread the tables of ``model`` over all ranks, in place; a process alone keeps them whole.

    Args:
        model: its tables on :func:`table_device`, all else on ``device``.
        device: this rank's.
        optimizer: of the tables.
        placement: of every table; the plan chooses where None.
        planner: in place of ``placement``; its plan is printed.
        wire: the precision in which vectors and their gradients are exchanged; their own by
            default.
    """
    if not dist.is_initialized():
        return model
    mesh = rank_mesh(device)
    plan: Planner | dict[str, Placement] | None = planner
    if planner is not None:
        report = plan_embeddings(model, planner, mesh, wire=wire)
        if dist.get_rank() == 0:
            print(report, flush=True)
    elif placement is not None:
        plan = dict.fromkeys(table_specs(model), placement)
    return shard_embeddings(model, mesh, plan, wire=wire, optimizer=optimizer)
