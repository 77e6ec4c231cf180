"""A check for optimizers that hold parameters which are about to be replaced."""

import gc
from collections.abc import Mapping

import torch
from torch import Tensor


def check_no_optimizer_has(parameters: Mapping[str, Tensor]) -> None:
    """Raise where a living optimizer has one of ``parameters``, by name, which are to be replaced
    by others that it would never train.

    Raises:
        ValueError: names the optimizer and the parameters.
    """
    found = _found(parameters)
    if found:
        # One that nobody can step any more may not have been collected yet.
        gc.collect()
        found = _found(parameters)
    if found:
        optimizer, names = found
        raise ValueError(
            f"optimizer {optimizer} was made before shard_embeddings, and would never change the "
            f"tables {names}, whose parameters are new then; make optimizers afterwards"
        )


def _found(parameters: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The kind of the first such optimizer, and the names of what it has."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    # PyTorch keeps no list of optimizers. type() is asked, since __class__ of a proxy or a mock may
    # name another class, or run code.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer):
            groups = getattr(candidate, "param_groups", ())
            held = [names[id(p)] for g in groups for p in g["params"] if id(p) in names]
            if held:
                return type(candidate).__name__, ", ".join(held)
    return None
