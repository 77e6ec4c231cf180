"""Optimizers' steps that do not happen where the device found the batch bad."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def follows_replays(optimizer: torch.optim.Optimizer) -> bool:
    """True if a replay of a captured ``optimizer.step()`` does what a call would.

    torchembed's optimizers do, and torch's where every parameter group has ``capturable=True`` and
    a tensor on its parameters' device for its ``lr``, which schedulers then change in place. One on
    the CPU would be read when the step is captured, and never again.
    """
    if hasattr(optimizer, "before_replay"):
        return True
    follow = [
        group.get("capturable") and isinstance(lr := group["lr"], Tensor) and lr.device == p.device
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return bool(follow) and all(follow)


def before_replay(optimizer: torch.optim.Optimizer) -> None:
    """Let the replays of ``optimizer``'s captured step have its learning rate of now."""
    if hasattr(optimizer, "before_replay"):
        optimizer.before_replay()  # type: ignore[attr-defined]


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """``optimizer.step()``, that changes no tensor where ``skip``, float32 ``[1]``, is not zero.

    The host does not wait. torchembed's optimizers, and torch's fused ones, skip by themselves. Of
    others parameters and state are copied before and put back after; what an optimizer counts on
    the host goes on, and state that this very step makes stays.
    """
    if skip is None:
        optimizer.step()
    elif hasattr(optimizer, "before_replay"):
        with skipping(optimizer, skip):
            optimizer.step()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        of_scaler: Any = optimizer
        of_scaler.found_inf, of_scaler.grad_scale = skip[0], None
        optimizer.step()
        del of_scaler.found_inf, of_scaler.grad_scale
    else:
        _step_and_put_back(optimizer, skip)


@contextlib.contextmanager
def skipping(optimizer: Any, skip: Tensor | None) -> Iterator[None]:
    """A context in which steps of one of torchembed's optimizers change nothing where ``skip`` is
    not zero."""
    optimizer.skip = skip
    try:
        yield
    finally:
        optimizer.skip = None


@torch.no_grad()
def _step_and_put_back(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    changed = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state.get(parameter, {}).values()
                changed += [parameter, *(s for s in state if isinstance(s, Tensor))]
    changed = [tensor for tensor in changed if tensor.device == skip.device]
    before = [tensor.clone() for tensor in changed]
    optimizer.step()
    is_skipped = skip[0] != 0
    for tensor, old in zip(changed, before, strict=True):
        torch.where(is_skipped, old, tensor, out=tensor)
