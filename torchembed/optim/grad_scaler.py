"""Loss scaling that follows the gradients of tables as well as dense ones."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchembed.optim.fused import FusedOptimizer
from torchembed.optim.joint import JointOptimizer, separate


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose scale also falls where only gradients of tables overflow.

    Torch's own skips such a step for the tables, but cannot see why: gradients of rows are no
    ``weight.grad``. Where several processes train one model, an overflow on one lowers the scale of
    all, by one small collective in :meth:`update`, which every one of them calls. Never
    synchronizes.

    Args:
        device: the device type, as for torch's scaler, which takes all other arguments, too.
        group: the processes that train one model; all of them where None.
    """

    def __init__(
        self,
        device: str = "cuda",
        *arguments: Any,
        group: dist.ProcessGroup | None = None,
        **others: Any,
    ):
        super().__init__(device, *arguments, **others)
        self._group = group

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **others: Any) -> Any:
        """Unscale the gradients and step ``optimizer``, or skip it, as torch's scaler does."""
        if self.is_enabled() and isinstance(optimizer, JointOptimizer):
            for part in optimizer.optimizers:
                self.step(part, *arguments, **others)
            return None
        result = super().step(optimizer, *arguments, **others)
        if self.is_enabled() and isinstance(optimizer, FusedOptimizer):
            flag = optimizer.overflow
            assert flag is not None
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            known = found.get(flag.device)
            found[flag.device] = flag if known is None else known.maximum(flag)
        return result

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, as torch's scaler does."""
        for part in separate([optimizer]):
            super().unscale_(part)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, as torch's scaler does; collective where several processes train.

        Raises:
            RuntimeError: if no optimizer was stepped by :meth:`step` since the last call.
        """
        if not self.is_enabled() or new_scale is not None:
            super().update(new_scale)
            return
        scale, _ = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise RuntimeError(
                "update() must come after scaler.step(optimizer), and none was called since the "
                "last update(); optimizer.step() does not unscale gradients"
            )
        if dist.is_initialized():
            combined = torch.zeros((), device=scale.device)
            for flag in flags:
                combined = combined.maximum(flag.to(scale.device, non_blocking=True))
            dist.all_reduce(combined, dist.ReduceOp.MAX, group=self._group)
            # The base class reads the flags of all optimizers: one joint flag stands for them.
            self._per_optimizer_states.clear()
            self._per_optimizer_states[0]["found_inf_per_device"] = {scale.device: combined}
        super().update()
