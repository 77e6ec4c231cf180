"""Steps of torch's SGD, Adagrad and Adam on dense parameters, as operations for CUDA graphs.

Parameters and states stay the optimizer's own tensors; the learning rate is read from it before
each step, and the step counted in it afterwards.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchembed.core.types import OptimizerKind
from torchembed.integrations.torchrec.trained_model.dense_parameters import AliasedParameter
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
"""Settings that change the rule to one that :class:`DenseRule` does not have."""


def plain_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers within ``optimizer``, which may be one of TorchRec's wrappers, whose steps
    compute a formula of :class:`~torchembed.ops.dense_update.DenseRule` and do nothing else."""
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
    """Steps the parameter groups of ``optimizers`` by the gradients of aliases.

    It has the parts of a torchembed optimizer that torchembed's pipeline uses. A group is taken as
    a whole, where all of its parameters are aliased, float32 and contiguous.

    Attributes:
        aliased: the aliased parameters of the groups that are taken.
    """

    skip: Tensor | None = None
    """float32 ``[1]``; where it is not zero on the device, updates change nothing."""

    may_step_early = True
    """:func:`plain_optimizers` have no hooks."""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], aliased: Sequence[AliasedParameter]
    ) -> None:
        by_parameter = {pair.parameter: pair for pair in aliased}
        self._groups = [
            _Group(optimizer, group, [by_parameter[p] for p in group["params"]])
            for optimizer in optimizers
            for group in optimizer.param_groups
            if all(p in by_parameter and _is_plain(p) for p in group["params"])
        ]
        self.aliased = [pair for group in self._groups for pair in group.aliased]
        self.param_groups = [
            {"params": [pair.alias for pair in group.aliased], "lr": group.lr}
            for group in self._groups
        ]
        self.state: dict[Tensor, dict[str, object]] = {}

    def zero_grad(self) -> None:
        """Begin a step anew; :class:`AliasedOptimizer` drops the gradients."""
        for group in self._groups:
            group.updated.clear()

    def begin(self) -> list[Hashable]:
        """Before a step: set step counts from the optimizers. Returns what a captured step assumes
        of each group: its rule, and the addresses of its states."""
        return [group.begin() for group in self._groups]

    def before_replay(self) -> None:
        """Copy the current learning rates to the device, where captured steps read them."""
        for group in self._groups:
            group.copy_lr()

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, but those that :meth:`step_early` has."""
        for group in self._groups:
            group.update(self.skip, None)
            group.updated.clear()

    @torch.no_grad()
    def step_early(self, parameters: Collection[Tensor]) -> None:
        """Update some aliases whose gradients are final before :meth:`step`: both are one step."""
        for group in self._groups:
            group.update(self.skip, parameters)

    def end(self) -> None:
        """After a step: count it in the optimizers' own states."""
        for group in self._groups:
            group.end()


def _is_plain(parameter: Tensor) -> bool:
    return parameter.dtype is torch.float32 and parameter.is_contiguous()


def _flat(state: Tensor) -> Tensor:
    """A flat view of ``state``, as a plain tensor where it is one of TorchRec's subclass."""
    return state.detach().as_subclass(Tensor).view(-1)


class _Group:
    """A parameter group of one of torch's optimizers, with its numbers on the device."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        aliased: list[AliasedParameter],
    ) -> None:
        self._optimizer, self._group, self.aliased = optimizer, group, aliased
        self._names, self._kind = _STATE_NAMES[type(optimizer)], _KINDS[type(optimizer)]
        device = aliased[0].alias.device
        self.lr = torch.zeros(1, device=device)
        self._known_lr = 0.0
        self._steps = torch.zeros(len(aliased), device="cpu")
        """The optimizer's step count for each pair, in this memory from the first step on."""
        self._counts = self._steps.unbind()
        self.updated: set[Tensor] = set()
        """Aliases that were updated in the current step."""
        self._counted = [True] * len(aliased), torch.ones(len(aliased), device="cpu")
        """For each parameter, if the last step counted it, as bools and as 0 and 1."""
        self._known_steps = self._steps.clone()
        """Host copy of ``_on_device``."""
        self._on_device = torch.zeros(len(aliased), device=device)
        self._has_begun = False
        """True until the step ends: one that failed may be counted on the device alone."""

    def copy_lr(self) -> None:
        """Copy the learning rate to the device where it has changed."""
        lr = float(self._group["lr"])
        if lr != self._known_lr:
            self.lr.fill_(lr)
            self._known_lr = lr

    def _states(self, pair: AliasedParameter) -> dict[str, Tensor]:
        """The parameter's states; missing ones are made as the optimizer's first step would."""
        state = self._optimizer.state[pair.parameter]
        if self._names and not state:
            like = pair.alias.detach()
            state["step"] = torch.tensor(0.0)
            state.update({name: torch.zeros_like(like) for name in self._names})
        return state

    def begin(self) -> Hashable:
        if not self._names:
            return self._rule()
        states = [self._states(pair) for pair in self.aliased]
        for state, mine in zip(states, self._counts, strict=True):
            if state["step"] is not mine:
                state["step"] = mine.copy_(state["step"])
        if self._has_begun or not torch.equal(self._steps, self._known_steps):
            self._on_device.copy_(self._steps)
            self._known_steps.copy_(self._steps)
        self._has_begun = True
        return self._rule(), *(state[name].data_ptr() for state in states for name in self._names)

    def _rule(self) -> DenseRule:
        return DenseRule(kind=self._kind, **rule_numbers(self._group))

    def update(self, skip: Tensor | None, aliases: Collection[Tensor] | None) -> None:
        """Step the pairs of ``aliases``, or those not updated early where None."""
        self.copy_lr()
        chosen = None if aliases is None else set(aliases)
        trained = [
            number
            for number, (_, alias) in enumerate(self.aliased)
            if (chosen is None or alias in chosen)
            and alias not in self.updated
            and alias.grad is not None
        ]
        if not trained:
            return
        rule, steps = self._rule(), self._on_device.split(1)
        self.updated.update(self.aliased[number].alias for number in trained)
        if self._kind is OptimizerKind.ADAM:
            one = 1.0 if skip is None else (skip == 0).float().reshape(())
            torch._foreach_add_([steps[n] for n in trained], one)  # type: ignore[attr-defined]
        for number in trained:
            pair = self.aliased[number]
            states = self._states(pair)
            assert pair.alias.grad is not None
            dense_update(
                pair.alias.detach().view(-1),
                tuple(_flat(states[name]) for name in self._names),
                pair.alias.grad.reshape(-1),
                rule,
                self.lr,
                step=steps[number],
                skip=skip,
            )

    def end(self) -> None:
        if self._names:
            are_trained = [pair.alias.grad is not None for pair in self.aliased]
            if are_trained != self._counted[0]:
                self._counted = are_trained, torch.tensor(are_trained, device="cpu").float()
            self._steps += self._counted[1]
            self._known_steps += self._counted[1]
            self._has_begun = False
