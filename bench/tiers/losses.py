"""Whether the losses of a measured system are right."""

from collections.abc import Sequence

from bench.step.reference_step import Expected, expected_losses
from bench.tiers.setting import TierSetting
from torchembed.data import Batch

FBGEMM_TOLERANCE = 1e-4
"""Largest difference of a loss of tables alone, which is of the order of 1: sums of float32 numbers
in another order, in a few steps of Adagrad."""
_OF_FBGEMM = "fp32"
"""Its vectors and their gradients are not rounded."""


class ExpectedLosses:
    """The right losses of the first steps: of tables on the device those of plain PyTorch with the
    dense part in float64, as far as rounding goes; of torchembed's elsewhere the same bits. Of
    tables alone nothing is expected of those on the device, and of others what these give.

    Args:
        setting: what is trained.
        checked: the batches of these steps.
    """

    def __init__(self, setting: TierSetting, checked: Sequence[Batch]) -> None:
        self._ours = setting.precisions
        self._of_fbgemm = self._ours._replace(wire=_OF_FBGEMM)
        self._true: Expected | None = None
        if setting.model == "dlrm":
            steps = [[batch] for batch in checked]
            self._true = expected_losses(setting, steps, [self._ours, self._of_fbgemm])
        self.on_device: list[float] | None = None
        """Losses of torchembed's tables on the device, once they are known."""

    def error(self, losses: list[float], *, is_fbgemm: bool) -> tuple[float | None, str | None]:
        """The largest error, None where nothing is known, and what is wrong where it is too
        large."""
        if self.on_device is not None and not is_fbgemm:
            expected, limit = self.on_device, 0.0
        elif self._true is not None:
            expected = [of_ranks[0] for of_ranks in self._true.losses]
            limit = self._true.tolerance[self._of_fbgemm if is_fbgemm else self._ours]
        elif self.on_device is not None:
            expected, limit = self.on_device, FBGEMM_TOLERANCE
        else:
            return None, None
        error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        problem = None
        if not error <= limit:
            problem = f"losses {losses} are up to {error:.2e} > {limit:.2e} from {expected}"
        return error, problem
