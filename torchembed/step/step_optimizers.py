"""The optimizers of a step: who steps them, when they change nothing, and what captured steps take
for granted."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchembed.autograd.gradient_slots import slot_of
from torchembed.modules.table_module import TableModule
from torchembed.optim import FusedOptimizer
from torchembed.optim.joint import JointOptimizer, separate
from torchembed.step.trained_modules import TrainedModules

_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class StepOptimizers:
    """A step's optimizers.

    Args:
        optimizers: as the caller gave them.
        in_given_order: step each as the caller would, a :class:`JointOptimizer` as a whole, so that
            hooks on steps see what they see in a loop by hand; no part of a step overlaps with
            another one then.

    Attributes:
        all: in the order in which they were given, parts of a :class:`JointOptimizer` in its place.
        of_tables: torchembed's, of embedding tables; none where all step in the given order.
        captured: of the dense part, where replays of a captured step do what a call would; all of
            them in the given order.
        others: to be called after a replay.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], *, in_given_order: bool = False
    ) -> None:
        self.all = separate(optimizers)
        self.of_tables: list[FusedOptimizer] = []
        self.captured, self.others = list(optimizers), list[torch.optim.Optimizer]()
        if not in_given_order:
            self.of_tables = [o for o in self.all if isinstance(o, FusedOptimizer)]
            following = [o for o in self.all if follows_replays(o)]
            self.captured = [o for o in following if not isinstance(o, FusedOptimizer)]
            self.others = [o for o in self.all if not follows_replays(o)]

    def zero_grad(self) -> None:
        """Clear all gradients, as a training loop does before forward."""
        for optimizer in self.all:
            if type(optimizer).zero_grad is _ZERO_GRAD and "zero_grad" not in vars(optimizer):
                # What torch's does, without its record for profiles, which takes ten times as long.
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad()

    def prepare_replay(self) -> None:
        """Let replays of captured steps have the learning rates of now."""
        for optimizer in (*self.of_tables, *self.captured):
            if hasattr(optimizer, "before_replay"):
                optimizer.before_replay()  # type: ignore[attr-defined]

    def gradients_in_slots(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients that a step has left in buffers of torchembed's dense optimizers, where
        replays of the step write theirs."""
        dense = [o for o in self.captured if not isinstance(o, FusedOptimizer)]
        parameters = [p for o in dense for group in o.param_groups for p in group["params"]]
        return [
            (parameter, parameter.grad)
            for parameter in parameters
            if (slot := slot_of(parameter)) is not None
            and parameter.grad is not None
            and slot.holds(parameter.grad)
        ]

    def take_gradients_of_others(self) -> list[tuple[Tensor, Tensor | None]]:
        """Take the captured gradients that steps after each replay need, and free the others."""
        groups = [group for optimizer in self.others for group in optimizer.param_groups]
        kept = [parameter for group in groups for parameter in group["params"]]
        gradients = [(parameter, parameter.grad) for parameter in kept]
        # What is left in .grad would keep its memory in the graphs' pool from being used again.
        self.zero_grad()
        return gradients

    def memory(self, *, is_cuda: bool) -> list[int]:
        """The addresses of what captured steps read and loading may replace: the states of torch's
        own captured optimizers, and learning rates that are tensors."""
        states = [
            state
            for optimizer in self.captured
            if not hasattr(optimizer, "before_replay")
            for of_parameter in optimizer.state.values()
            for state in of_parameter.values()
        ]
        captured = (*self.of_tables, *self.captured)
        rates = [group["lr"] for optimizer in captured for group in optimizer.param_groups]
        rates = [r for r in rates if isinstance(r, Tensor) and r.is_cuda == is_cuda]
        return [tensor.data_ptr() for tensor in (*states, *rates) if isinstance(tensor, Tensor)]


def update(optimizers: Sequence[torch.optim.Optimizer], skip: Tensor | None) -> None:
    """Step ``optimizers``; nothing changes where ``skip`` is not zero."""
    for optimizer in optimizers:
        step_unless(optimizer, skip)


def update_early(optimizers: Sequence[FusedOptimizer], skip: Tensor | None) -> None:
    """Update the rows whose gradients are there, before :func:`update` does the others."""
    for optimizer in optimizers:
        with skipping(optimizer, skip):
            optimizer.step_early()


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


def unchanged_by_replays(
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Those of ``optimizers``, in the given order, that find all weights and gradients as in a loop
    by hand where they step after a replay: none that follows replays comes after them, and none
    leaves gradients behind."""
    parts = separate(optimizers)
    follow = [follows_replays(part) for part in parts]
    if any(f and not isinstance(p, FusedOptimizer) for p, f in zip(parts, follow, strict=True)):
        return []
    # Rows' gradients are gone after the step in a loop by hand, too.
    return parts[len(parts) - follow[::-1].index(True) :] if True in follow else parts


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """``optimizer.step()``, that changes no tensor where ``skip``, float32 ``[1]``, is not zero.

    The host does not wait. torchembed's optimizers, and torch's fused ones, skip by themselves. Of
    others parameters and state are copied before and put back after; what an optimizer counts on
    the host goes on, and state that this very step makes stays.
    """
    if skip is None:
        optimizer.step()
    elif isinstance(optimizer, JointOptimizer):
        _step_skipping(optimizer, optimizer.optimizers, skip)
    elif hasattr(optimizer, "before_replay"):
        _step_skipping(optimizer, [optimizer], skip)
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        # The way in which a gradient scaler makes a fused optimizer skip its step on the device.
        of_scaler: Any = optimizer
        of_scaler.found_inf, of_scaler.grad_scale = skip[0], None
        optimizer.step()
        del of_scaler.found_inf, of_scaler.grad_scale
    else:
        _step_and_put_back(optimizer, skip)


def _step_skipping(optimizer: torch.optim.Optimizer, parts: Sequence[Any], skip: Tensor) -> None:
    """``optimizer.step()``, in which its ``parts``, torchembed's optimizers, change nothing where
    ``skip`` is not zero."""
    # No context for each: every step does this.
    for part in parts:
        part.skip = skip
    try:
        optimizer.step()
    finally:
        for part in parts:
            part.skip = None


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
    changed: dict[torch.dtype, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state.get(parameter, {}).values()
                for tensor in (parameter, *(s for s in state if isinstance(s, Tensor))):
                    # Step counts may be on the host, where the flag is not known.
                    if tensor.device == skip.device:
                        changed.setdefault(tensor.dtype, []).append(tensor)
    # Few operations on all of one dtype at once, since a GPU takes longer to start each than to do.
    before = {dtype: _flat(tensors) for dtype, tensors in changed.items()}
    optimizer.step()
    is_skipped = skip != 0
    for dtype, tensors in changed.items():
        # Chosen on the device, since a branch of the host would wait for the flag.
        chosen = torch.where(is_skipped, before[dtype], _flat(tensors))
        parts = chosen.split([tensor.numel() for tensor in tensors])
        shaped = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)  # type: ignore[attr-defined]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Copies of all elements, one tensor after the other, ``[N]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class Assumptions:
    """The state of a model and its optimizers that prepared or captured steps rely on."""

    def __init__(
        self, trained: TrainedModules, optimizers: StepOptimizers, device: torch.device
    ) -> None:
        modules = [module for module in trained.modules() if isinstance(module, TableModule)]
        self._table_sets = [module.table_set for module in modules]
        of_tables = {id(table.parameter) for of in self._table_sets for table in of.tables}
        # Tables, which are many, are looked at by their sets: every step asks.
        self._parameters = [p for p in trained.parameters() if id(p) not in of_tables]
        self._modules = trained.modules()
        self._optimizers, self._is_cuda = optimizers, device.type == "cuda"
        self._model_before = self._model_now()
        self._memory_before: list[int] | None = None

    def _model_now(self) -> tuple[list[object], list[int], list[bool], list[bool]]:
        forms: list[object] = [table_set.current_form() for table_set in self._table_sets]
        # Each step asks, so that C code goes over the parameters.
        addresses = list(map(Tensor.data_ptr, self._parameters))
        are_trained = [parameter.requires_grad for parameter in self._parameters]
        return forms, addresses, are_trained, [module.training for module in self._modules]

    def note_capture(self) -> None:
        """Note that a capture reads the optimizers' states where they are now."""
        self._memory_before = self._optimizers.memory(is_cuda=self._is_cuda)

    @property
    def are_stale(self) -> bool:
        """True if tables were regrouped since, parameters frozen or given other memory, modules set
        to training or evaluation, or states or learning rates that a capture knows replaced."""
        before = self._memory_before
        moved = before is not None and before != self._optimizers.memory(is_cuda=self._is_cuda)
        return moved or self._model_before != self._model_now()
