"""Steps of torch's plainer optimizers on dense parameters as operations that a graph may hold.

Parameters and states stay the optimizer's own tensors; learning rates are read from it before each
step, and steps counted in it after each.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchembed.core.types import OptimizerKind
from torchembed.integrations.torchrec.dense_parameters import Leaf
from torchembed.ops.dense_update import DenseRule, dense_update
from torchembed.optim.hyperparameters import rule_numbers

_STATE_NAMES = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
}
_KINDS = {
    torch.optim.SGD: OptimizerKind.SGD,
    torch.optim.Adagrad: OptimizerKind.ADAGRAD,
    torch.optim.Adam: OptimizerKind.ADAM,
}
_OTHER_RULES = (
    *("momentum", "nesterov", "maximize", "amsgrad", "lr_decay", "decoupled_weight_decay"),
    *("capturable", "differentiable", "fused"),
)
"""Settings of which each makes a rule that is not ours."""


def plain_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Those within TorchRec's ``optimizer`` whose steps are the formulas of
    :class:`~torchembed.ops.dense_update.DenseRule`, and nothing more."""
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return []
    if type(optimizer) is CombinedOptimizer:
        return [found for _, inner in optimizer.optimizers for found in plain_optimizers(inner)]
    if type(optimizer) is KeyedOptimizerWrapper:
        return plain_optimizers(optimizer._optimizer)
    is_plain = type(optimizer) in _KINDS and not any(
        group.get(name) for group in optimizer.param_groups for name in _OTHER_RULES
    )
    return [optimizer] if is_plain else []


class DenseUpdates:
    """Steps the parameter groups of ``optimizers`` by the gradients of ``leaves``.

    It has the parts of an optimizer of ours that a pipeline uses.

    Attributes:
        leaves: those that it updates.
    """

    skip: Tensor | None = None
    """float32 ``[1]``; where it is not zero on the device, :meth:`step` changes nothing."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], leaves: Sequence[Leaf]) -> None:
        by_parameter = {leaf.parameter: leaf for leaf in leaves}
        self._groups = [
            _Group(optimizer, group, [by_parameter[p] for p in group["params"]])
            for optimizer in optimizers
            for group in optimizer.param_groups
            if all(p in by_parameter and _is_plain(p) for p in group["params"])
        ]
        self.leaves = [leaf for group in self._groups for leaf in group.leaves]
        self.param_groups = [
            {"params": [leaf.own for leaf in group.leaves], "lr": group.lr}
            for group in self._groups
        ]
        self.state: dict[Tensor, Any] = {}

    def zero_grad(self) -> None:
        """Left to who steps the user's optimizer."""

    def begin(self) -> Any:
        """Before a step: count on from where the optimizers are, and say what a graph takes for
        granted of them."""
        return [group.begin() for group in self._groups]

    def before_replay(self) -> None:
        """Show learning rates of now to graphs that hold :meth:`step`."""
        for group in self._groups:
            group.show_lr()

    @torch.no_grad()
    def step(self) -> None:
        for group in self._groups:
            group.show_lr()
            group.update(self.skip)

    def end(self) -> None:
        """After a step: count it, as the optimizers do."""
        for group in self._groups:
            group.end()


def _is_plain(parameter: Tensor) -> bool:
    return parameter.dtype is torch.float32 and parameter.is_contiguous()


def _flat(state: Tensor) -> Tensor:
    """Of what TorchRec's tables give, too, which is of another class."""
    return state.detach().as_subclass(Tensor).view(-1)


class _Group:
    """A parameter group of one of torch's optimizers."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], leaves: list[Leaf]
    ) -> None:
        self._optimizer, self._group, self.leaves = optimizer, group, leaves
        self._names, self._kind = _STATE_NAMES[type(optimizer)], _KINDS[type(optimizer)]
        device = leaves[0].own.device
        self.lr = torch.zeros(1, device=device)
        self._known_lr = 0.0
        self._steps = torch.zeros(len(leaves), device="cpu")
        """What the optimizer counts for each leaf, in this memory from the first step on."""
        self._counts = self._steps.unbind()
        self._counted = [True] * len(leaves), torch.ones(len(leaves), device="cpu")
        """Which leaves the last step counted, also as numbers."""
        self._known_steps = self._steps.clone()
        """What is on the device."""
        self._on_device = torch.zeros(len(leaves), device=device)

    def show_lr(self) -> None:
        """Bring the learning rate to the device where it has changed."""
        lr = float(self._group["lr"])
        if lr != self._known_lr:
            self.lr.fill_(lr)
            self._known_lr = lr

    def _states(self, leaf: Leaf) -> dict[str, Tensor]:
        """As the optimizer would make them in its first step."""
        state = self._optimizer.state[leaf.parameter]
        if self._names and not state:
            like = leaf.own.detach()
            state["step"] = torch.tensor(0.0)
            state.update({name: torch.zeros_like(like) for name in self._names})
        return state

    def begin(self) -> Any:
        if not self._names:
            return self._rule()
        states = [self._states(leaf) for leaf in self.leaves]
        for state, mine in zip(states, self._counts, strict=True):
            if state["step"] is not mine:
                # One addition counts all.
                state["step"] = mine.copy_(state["step"])
        if not torch.equal(self._steps, self._known_steps):
            self._on_device.copy_(self._steps)
            self._known_steps.copy_(self._steps)
        return self._rule(), [state[name].data_ptr() for state in states for name in self._names]

    def _rule(self) -> DenseRule:
        return DenseRule(kind=self._kind, **rule_numbers(self._group))

    def update(self, skip: Tensor | None) -> None:
        rule, of_leaves = self._rule(), self._on_device.split(1)
        trained = [n for n, leaf in enumerate(self.leaves) if leaf.own.grad is not None]
        if self._kind is OptimizerKind.ADAM and trained:
            one = 1.0 if skip is None else (skip == 0).float().reshape(())
            torch._foreach_add_([of_leaves[n] for n in trained], one)  # type: ignore[attr-defined]
        for number in trained:
            leaf = self.leaves[number]
            states = self._states(leaf)
            assert leaf.own.grad is not None
            dense_update(
                leaf.own.detach().view(-1),
                tuple(_flat(states[name]) for name in self._names),
                leaf.own.grad.reshape(-1),
                rule,
                self.lr,
                step=of_leaves[number],
                skip=skip,
            )

    def end(self) -> None:
        if self._names:
            are_trained = [leaf.own.grad is not None for leaf in self.leaves]
            if are_trained != self._counted[0]:
                self._counted = are_trained, torch.tensor(are_trained, device="cpu").float()
            self._steps += self._counted[1]
            self._known_steps += self._counted[1]
