"""Tables in a model that ``torch.nn.parallel.DistributedDataParallel`` wraps."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchembed.tables import table_of

if TYPE_CHECKING:
    from torchembed.sharding.transport.gradient_mean import GradientMean

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute by which a module tells ``DistributedDataParallel`` names to leave alone."""


def active_ddp() -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` of several ranks whose forward runs now."""
    # No public function tells; torch.compile asks this one, too.
    ddp = DistributedDataParallel._get_active_ddp_module()
    return None if ddp is None or dist.get_world_size(ddp.process_group) == 1 else ddp


def ignore_tables(model: nn.Module) -> None:
    """Exclude tables from any ``DistributedDataParallel`` around ``model`` or a module in it.

    It would broadcast the first rank's rows over all others', which hold different ones, and
    average gradients that torchembed averages already.
    """
    for module in model.modules():
        names = [n for n, p in module.named_parameters() if table_of(p) is not None]
        if names:
            before: Iterable[str] = getattr(module, _IGNORED, ())
            setattr(module, _IGNORED, list(dict.fromkeys([*before, *names])))


class DenseOwner:
    """Decides whether torchembed or ``DistributedDataParallel`` averages the dense gradients."""

    def __init__(self) -> None:
        self._last: weakref.ref[DistributedDataParallel] | None = None

    def __reduce__(self) -> tuple[type["DenseOwner"], tuple[()]]:
        """Copies start without a wrapper."""
        return DenseOwner, ()

    def note_forward(self, module: nn.Module, mean: "GradientMean | None") -> None:
        """Note a forward of a sharded ``module``: ``mean`` leaves out the parameters that a
        ``DistributedDataParallel`` around the module averages, and comes after other hooks.

        Raises:
            RuntimeError: where that wrapper treats the module's tables as dense parameters.
        """
        if mean is not None:
            mean.come_last()
        ddp, last = active_ddp(), None if self._last is None else self._last()
        # Nothing to do in every forward but the first, and those after the model was wrapped anew.
        if ddp is last:
            return
        of_ddp = set() if ddp is None else _parameters_of(ddp)
        taken = [p for p in module.parameters() if p in of_ddp]
        if taken:
            names = ", ".join(table.spec.name for p in taken if (table := table_of(p)) is not None)
            raise RuntimeError(
                f"DistributedDataParallel takes tables {names} for dense parameters, and has given "
                "all ranks the first one's rows; call shard_embeddings for the module that it goes "
                "around, or one around that, and load the rows again"
            )
        if mean is not None:
            mean.leave_out(of_ddp)
        self._last = None if ddp is None else weakref.ref(ddp)


def _parameters_of(ddp: DistributedDataParallel) -> set[nn.Parameter]:
    """The parameters that ``ddp`` makes equal on all ranks."""
    ignored = ddp.parameters_to_ignore
    return {p for name, p in ddp.module.named_parameters() if name not in ignored}
