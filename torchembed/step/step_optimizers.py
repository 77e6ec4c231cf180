"""The optimizers of a step, by who steps them, and what captured steps take for granted."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchembed.modules.table_module import TableModule
from torchembed.optim import FusedOptimizer
from torchembed.step.predicated_update import (
    before_replay,
    follows_replays,
    skipping,
    step_unless,
)


class StepOptimizers:
    """A step's optimizers.

    Attributes:
        all: in the order in which they were given.
        of_tables: torchembed's, of embedding tables.
        captured: of the dense part, where replays of a captured step do what a call would.
        others: to be called after a replay.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = list(optimizers)
        self.of_tables = [o for o in optimizers if isinstance(o, FusedOptimizer)]
        following = [o for o in optimizers if follows_replays(o)]
        self.captured = [o for o in following if not isinstance(o, FusedOptimizer)]
        self.others = [o for o in optimizers if not follows_replays(o)]

    def zero_grad(self) -> None:
        """Clear all gradients, as a training loop does before forward."""
        for optimizer in self.all:
            optimizer.zero_grad()

    def take_gradients_of_others(self) -> list[tuple[Tensor, Tensor | None]]:
        """Take the captured gradients that steps after each replay need, and free the others."""
        groups = [group for optimizer in self.others for group in optimizer.param_groups]
        kept = [parameter for group in groups for parameter in group["params"]]
        gradients = [(parameter, parameter.grad) for parameter in kept]
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


def prepare_replay(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let replays of their captured steps have their learning rates of now."""
    for optimizer in optimizers:
        before_replay(optimizer)


class Assumptions:
    """The state of a model and its optimizers that prepared or captured steps rely on."""

    def __init__(self, model: nn.Module, optimizers: StepOptimizers, device: torch.device) -> None:
        modules = [module for module in model.modules() if isinstance(module, TableModule)]
        self._table_sets = [module.table_set for module in modules]
        of_tables = {id(table.parameter) for of in self._table_sets for table in of.tables}
        # Tables, which are many, are looked at by their sets: every step asks.
        self._parameters = [p for p in model.parameters() if id(p) not in of_tables]
        self._modules = list(model.modules())
        self._optimizers, self._is_cuda = optimizers, device.type == "cuda"
        self._model_before = self._model_now()
        self._memory_before: list[int] | None = None

    def _model_now(self) -> Any:
        forms = [table_set.current_form() for table_set in self._table_sets]
        addresses = [parameter.data_ptr() for parameter in self._parameters]
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
