"""The objects whose states make up a training run."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchembed.optim.joint import separate


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The objects whose states a run needs to resume as if it had not stopped.

    Attributes:
        model: the model, whose parameters and buffers are saved whole, whatever their placement.
        optimizers: a list of the optimizers of its parameters. States are saved under the names of
            parameters.
        others: everything else with ``state_dict`` and ``load_state_dict``, by name: learning-rate
            schedulers, the position in the data, a history. These states belong to each rank, and
            are pickled.

    Raises:
        TypeError: for a model that is no module, optimizers that are no list of optimizers, and
            others without these methods.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    others: Mapping[str, Stateful] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take joint optimizers apart, and raise ``TypeError`` for what cannot be saved, which
        ``save`` would find late."""
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {_kind(self.model)}")
        _check_optimizers(self.optimizers)
        object.__setattr__(self, "optimizers", separate(self.optimizers))
        _check_others(self.others)


def _kind(value: object) -> str:
    return type(value).__name__


def _check_optimizers(optimizers: object) -> None:
    wanted = "optimizers must be a list of torch.optim.Optimizer"
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError(f"{wanted}, got a single {_kind(optimizers)}; pass [optimizer]")
    if not isinstance(optimizers, Sequence):
        raise TypeError(f"{wanted}, got {_kind(optimizers)}")
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizers[{index}] must be a torch.optim.Optimizer, got {_kind(optimizer)}"
            )


def _check_others(others: object) -> None:
    if not isinstance(others, Mapping):
        raise TypeError(
            f"others must be a mapping from names to objects with a state, got {_kind(others)}"
        )
    for name, other in others.items():
        if not isinstance(name, str):
            raise TypeError(f"others must have names as keys, got {name!r}")
        methods = ("state_dict", "load_state_dict")
        missing = [method for method in methods if not callable(getattr(other, method, None))]
        if missing:
            lacks = "neither" if len(missing) == len(methods) else f"no {missing[0]}()"
            raise TypeError(
                f"others[{name!r}] must have state_dict() and load_state_dict(), got "
                f"{_kind(other)}, which has {lacks}"
            )
