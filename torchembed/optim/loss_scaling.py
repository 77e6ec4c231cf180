"""The scaling of a loss by ``GradScaler``: the gradients of tables unscaled, and checked for being
finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchembed.tables import RecordedGradients, Table


def overflow_flag(
    found_inf: Tensor | int,
    scale: Tensor | None,
    entries: Sequence[RecordedGradients],
    tables: Sequence[Table],
) -> Tensor:
    """A flag, float32 ``[]``, that is 1 where a gradient is not finite, on any rank that holds some
    of ``tables``.

    As with torch's optimizers, all tables skip where the gradients of one are not finite. The
    collective needs every rank, also one that has no gradients. Never synchronizes.

    Args:
        found_inf: of the scaler, for other gradients; the number 0 where no parameter has a
            ``weight.grad``.
        scale: of the loss; None where the scaler has unscaled the gradients before.
        entries: the gradients of ``tables``.
        tables: all of an optimizer.
    """
    for entry in entries:
        entry.wait()
    known = [given.device for given in (scale, found_inf) if isinstance(given, Tensor)]
    flag = torch.zeros((), device=known[0] if known else "cpu") + found_inf
    for grad, _, _ in (entry.gradients for entry in entries):
        flag = flag.maximum(1.0 - torch.isfinite(grad).all().float().to(flag.device))
    for make_maximum in dict.fromkeys(table.max_over_holders for table in tables):
        if make_maximum is not None:
            make_maximum(flag)
    return flag
