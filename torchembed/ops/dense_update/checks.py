"""Requirements of ``torchembed::dense_update`` on its arguments."""

from collections.abc import Sequence

import torch

from torchembed.core import checks
from torchembed.core.types import OptimizerKind
from torchembed.core.update_records import DenseUpdate

UNIT = 8
"""Elements; each part begins at a multiple of it, so that kernels read 16 bytes at a time."""
_SCALARS = ("lr", "step", "grad_multiplier", "skip")

_NUM_STATES = {int(OptimizerKind.SGD): 0, int(OptimizerKind.ADAGRAD): 1, int(OptimizerKind.ADAM): 2}


def check_dense_update(update: DenseUpdate) -> None:
    weight, optimizer, grad = update.weight, update.optimizer, update.grad
    checks.check_dtype("weight", weight, (torch.float32,), "keep 16-bit copies in rounded")
    if optimizer not in _NUM_STATES:
        raise ValueError(f"optimizer must be the value of SGD, ADAGRAD or ADAM, got {optimizer}")
    states = {"state0": update.state0, "state1": update.state1}
    for index, (name, state) in enumerate(states.items()):
        if state is not None:
            checks.check_dtype(name, state, (torch.float32,), "call .float()")
        elif index < _NUM_STATES[optimizer]:
            kind = OptimizerKind(optimizer).name
            raise ValueError(f"{name} must be given for {kind}, got None")
    rounded = update.rounded
    if rounded is not None:
        checks.check_dtype("rounded", rounded, checks.FLOAT_DTYPES[1:], "leave it out for float32")
    checks.check_float("grad", grad)
    changed = {"weight": weight, "rounded": rounded, **states}
    for name, tensor in (*changed.items(), ("grad", grad)):
        if tensor is None:
            continue
        checks.check_dim(name, tensor, 1)
        checks.check_numel(name, tensor, weight.numel(), "one for each element of weight")
        if tensor is not grad and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, since it is updated in place")
    checks.check_contiguous("grad", grad)
    scalars = {name: getattr(update, name) for name in _SCALARS}
    checks.check_scalars(**scalars)
    if optimizer == OptimizerKind.ADAM and update.step is None:
        raise ValueError("step must be given for ADAM, got None")
    checks.check_same_device("weight", weight, grad=grad, rounded=rounded, **states, **scalars)
    _check_bounds(update.bounds, weight.numel())


def _check_bounds(bounds: Sequence[int], num_elements: int) -> None:
    if len(bounds) % 2:
        raise ValueError(f"bounds must hold a begin and an end of each part, got {len(bounds)}")
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        if start % UNIT or not 0 <= start <= stop <= num_elements:
            raise ValueError(
                f"parts must begin at a multiple of {UNIT} and end among the {num_elements} "
                f"elements of weight, got [{start}, {stop})"
            )
