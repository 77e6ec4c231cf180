"""The arguments of ``TrainPipeline``: checked, and what follows from them alone."""

import warnings
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from torchembed.core import ranks
from torchembed.core.checks import check_autocast
from torchembed.modules.sharded.bound_to_ranks import BoundToRanks
from torchembed.modules.sharded.sharded_collection import ShardedCollection
from torchembed.sharding.transport.channel import PushDomain
from torchembed.step.stages import Reason


def listed(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """One optimizer or several as a list.

    Raises:
        TypeError: for what is no optimizer.
    """
    if hasattr(optimizers, "param_groups"):
        return [cast("torch.optim.Optimizer", optimizers)]
    given = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in given:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                "optimizers must be an optimizer or several in a list, got "
                f"{type(optimizer).__name__}; make one of the model's parameters, as "
                "torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.02)"
            )
    return given


def check_model(model: object) -> None:
    """Raise unless ``model`` is a module with parameters."""
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        made = f"; make one: {name}(...)" if isinstance(model, type) else ""
        raise TypeError(f"model must be a torch.nn.Module, got {name}{made}")
    if next(model.parameters(), None) is None:
        raise ValueError("model must have parameters to train, got none")


def check_numbers(
    *,
    autocast: object,
    max_grad_norm: object,
    timeout_seconds: float,
    self_check_every: int | None,
    max_layouts: int,
) -> None:
    """Raise where one of these arguments is none that ``TrainPipeline`` documents."""
    check_autocast(autocast)
    if not (max_grad_norm is None or isinstance(max_grad_norm, (int, float))):
        raise TypeError(f"max_grad_norm must be a number or None, got {max_grad_norm!r}")
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm must not be negative, got {max_grad_norm}")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
    if self_check_every is not None and self_check_every < 1:
        raise ValueError(f"self_check_every must be at least 1, or None, got {self_check_every}")
    if max_layouts < 1:
        raise ValueError(f"max_layouts must be at least 1, got {max_layouts}")


def why_not_captured(
    capture: bool | None, group: dist.ProcessGroup | None, *, is_cuda: bool
) -> Reason | None:
    """The reason why all steps are eager; None where they are captured if they can be.

    Warns where ``capture`` asks for captured steps that the ranks of ``group`` cannot take.
    """
    if capture is None and not is_cuda:
        return Reason("a CPU has no graphs; capture=True takes the steps that a GPU would capture")
    if capture is False:
        return Reason("capture=False")
    if not ranks.is_of_some(group):
        return None
    # The ranks agree on each captured step by collectives of all processes.
    why = Reason("the model's tables are sharded over some of all processes")
    warnings.warn(
        f"the train step is not captured as a CUDA graph, so it runs eagerly, since {why}; start "
        "these processes by themselves",
        stacklevel=3,  # whoever makes the pipeline
    )
    return why


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that train ``model``: those over which its tables are sharded, else all;
    None where there is one."""
    for module in model.modules():
        if isinstance(module, BoundToRanks):
            return module.ranks.group
    return dist.group.WORLD if ranks.world_size() > 1 else None


def push_domains_of(model: nn.Module) -> list[PushDomain]:
    """The memory that the GPUs that train ``model`` store into, each into the others'."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedCollection)]
    return list(dict.fromkeys(m.ranks.push for m in sharded if m.ranks.push is not None))
