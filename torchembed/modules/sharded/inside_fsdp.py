"""Sharded tables in a model that ``torch.distributed.fsdp.fully_shard`` is applied to."""

import functools
from collections.abc import Callable

from torch import nn

from torchembed.modules.table_module import TableModule


@functools.cache
def _mark() -> Callable[[nn.Module], nn.Module]:
    """The function that marks a module as one of those that ``fully_shard`` passes over."""
    from torch.distributed._composable.contract import contract

    # Known by its name: torch's own ``replicate`` marks modules so whose parameters are not to be
    # divided over ranks again.
    @contract()
    def replicate(module: nn.Module) -> nn.Module:
        return module

    return replicate


def leave_to_torchembed(model: nn.Module) -> None:
    """Have ``fully_shard`` of ``model``, or of a module in or around it, leave its tables alone.

    It would gather the ranks' rows, which are different ones, for each forward.
    """
    for module in model.modules():
        if isinstance(module, TableModule):
            _mark()(module)
