"""Sharded tables in a model that ``torch.distributed.fsdp.fully_shard`` is applied to."""

from torch import nn
from torch.distributed._composable.contract import contract

from torchembed.modules.table_module import TableModule


@contract()
def replicate(module: nn.Module) -> nn.Module:
    """Marks ``module`` as one of those that ``fully_shard`` passes over.

    It goes by the name of this function: torch's own ``replicate`` marks modules so whose
    parameters are not to be divided over ranks again.
    """
    return module


def leave_to_torchembed(model: nn.Module) -> None:
    """Have ``fully_shard`` of ``model``, or of a module in or around it, leave its tables alone.

    It would gather the ranks' rows, which are different ones, for each forward.
    """
    for module in model.modules():
        if isinstance(module, TableModule):
            replicate(module)
