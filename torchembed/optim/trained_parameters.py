"""The parameters that optimizers have, against those of the model that they are to train."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torchembed.core import ranks
from torchembed.tables import table_of


def check_optimizers_train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss: nn.Module | None = None,
) -> None:
    """Raise where ``optimizers`` would leave a part of ``model`` as it is, or train something else.

    Where one is no ``torch.optim.Optimizer`` but has its methods alone, whoever made it knows what
    it trains.

    Args:
        loss: a loss function with dense parameters of its own, which optimizers may have; on one
            rank alone, since gradients are averaged over ranks for what the model holds.

    Raises:
        ValueError: names the parameters that require a gradient and no optimizer has, and those of
            optimizers that are not the model's.
    """
    if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        return
    in_model = {id(_identity(parameter)) for parameter in model.parameters()}
    if loss is not None and ranks.world_size() == 1:
        in_model |= {id(p) for p in loss.parameters() if table_of(p) is None}
    foreign = [
        f"one of {type(optimizer).__name__}'s, of shape {tuple(parameter.shape)}"
        for optimizer in optimizers
        for parameter in _parameters_of([optimizer])
        if id(_identity(parameter)) not in in_model
    ]
    if foreign:
        raise ValueError(
            f"optimizers must have parameters of the model alone, but {_listed(foreign)} is not in "
            "it; make optimizers after shard_embeddings, or whatever else replaces parameters, and "
            "let the model hold a loss function that trains tables or, before it is sharded over "
            "ranks, parameters, as in model.loss = loss_fn; one that trains dense parameters on "
            "one rank may be the loss_fn, where it is a module and no function around one"
        )
    held = {id(_identity(p)) for p in _parameters_of(optimizers)}
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(_identity(parameter)) not in held
    ]
    if missing:
        raise ValueError(
            f"optimizers must have all parameters of the model that require a gradient, but none "
            f"has {_listed(missing)}; give them to one, or freeze them by requires_grad_(False)"
        )


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def _identity(parameter: Tensor) -> object:
    """Identity of a parameter that lasts where a table's is replaced, as by ``load_state_dict``."""
    table = table_of(parameter)
    return parameter if table is None else table


def _listed(names: Sequence[str]) -> str:
    """At most three of ``names``, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
