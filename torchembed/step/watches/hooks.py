"""Hooks and replaced methods of Python, which a replay of a captured step would not call."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from torchembed.step.stages import Reason
from torchembed.step.step_optimizers import unchanged_by_replays
from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.replaced_methods import ReplacedMethod, ReplacedMethods
from torchembed.step.watches.watched_values import WatchedValues

_OF_OPTIMIZERS = {
    "_optimizer_step_pre_hooks": "step pre-hook",
    "_optimizer_step_post_hooks": "step post-hook",
}
_OF_MODULES = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_OF_PARAMETERS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
_GLOBAL = {
    "step pre-hook of all optimizers": _global_optimizer_pre_hooks,
    "step post-hook of all optimizers": _global_optimizer_post_hooks,
    "forward pre-hook of all modules": _global_forward_pre_hooks,
    "forward hook of all modules": _global_forward_hooks,
    "backward pre-hook of all modules": _global_backward_pre_hooks,
    "backward hook of all modules": _global_backward_hooks,
}
_GRAPH_SAFE = ("torchembed.", "torch.nn.")
"""Packages whose hooks a graph may hold: torchembed's belong to steps, and torch's own, as those of
pruning and of the normalization of weights, compute with tensors alone."""
_MAX_NAMED = 3
"""Number of hooks and methods that a warning names."""

Hooks = Mapping[int, Callable[..., object]]
"""Registered hooks by the number of their handles, as torch keeps them."""


class _Hook(NamedTuple):
    hooks: Hooks
    number: int
    place: str
    """The hook's kind and what it is registered on."""

    @property
    def is_there(self) -> bool:
        """True until the hook is removed."""
        return self.number in self.hooks

    def __str__(self) -> str:
        hook = self.hooks[self.number]
        return f"{getattr(hook, '__qualname__', type(hook).__qualname__)} ({self.place})"


class PythonHooks:
    """The hooks on a model, its parameters and optimizers, and torch's global ones, and the methods
    that replace others, that only a step without a graph calls.

    Hooks on an optimizer that steps after replays, and that finds then what it finds in a loop by
    hand, are none of them.

    Args:
        model: whose modules and parameters are looked at.
        optimizers: as the caller gave them.
        values: notices replaced methods.
        loss_fn: of the pipeline, whose modules and parameters are looked at as well.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        values: WatchedValues,
        loss_fn: object = None,
    ) -> None:
        self._trained = TrainedModules.of(model, loss_fn)
        self._optimizers, self._values = list(optimizers), values
        self._replaced = ReplacedMethods(model, optimizers)
        self._known: list[_Hook] = []
        self._methods: list[ReplacedMethod] = []
        self._last_refresh = -1
        """The number of refreshes of ``values`` when methods were last looked for."""
        self._last_number = -1
        """The number of handles that had been made when hooks were last looked for."""
        self._has_warned = False
        """True if a warning has named the hooks that are there."""
        self._first: tuple[_Hook | ReplacedMethod, Reason] | None = None
        """The first that was there when :attr:`reason` was asked for last, and the reason."""

    @property
    def are_there(self) -> bool:
        """True while such a hook is registered, or such a method there.

        Every registration takes the next number of a counter in torch, so that nothing is looked
        at while that stays the same.
        """
        if RemovableHandle.next_id != self._last_number:
            self._known = list(self._find())
            self._last_number = RemovableHandle.next_id
        elif self._known:
            self._known = [hook for hook in self._known if hook.is_there]
        if self._values.num_refreshes != self._last_refresh:
            self._methods = list(self._replaced.find())
            self._last_refresh = self._values.num_refreshes
        if self._known or self._methods:
            return True
        self._has_warned = False
        return False

    @property
    def reason(self) -> Reason | None:
        """The first that was there when last asked; None without one."""
        found = next(iter(self._known or self._methods), None)
        if found is None:
            return None
        # Every step asks, some of them more than once.
        if self._first is None or self._first[0] is not found:
            self._first = found, Reason("no graph can call it", str(found))
        return self._first[1]

    def warn_once(self, consequence: str) -> None:
        """Warn that those that are there have ``consequence``, unless that was said before."""
        if self._has_warned:
            return
        self._has_warned = True
        found = [str(one) for one in (*self._known, *self._methods)]
        named = found[:_MAX_NAMED]
        if len(found) > _MAX_NAMED:
            named.append(f"{len(found) - _MAX_NAMED} more")
        kinds = [
            *(["hooks"] if self._known else []),
            *(["replaced methods"] if self._methods else []),
        ]
        warnings.warn(
            f"no CUDA graph can call {' and '.join(kinds)}, so {consequence}: {', '.join(named)}",
            stacklevel=5,  # whoever called the pipeline
        )

    def _find(self) -> Iterator[_Hook]:
        for place, hooks in _GLOBAL.items():
            yield from _hooks_in(hooks, place)
        called = unchanged_by_replays(self._optimizers)
        for optimizer in self._optimizers:
            if any(optimizer is other for other in called):
                continue
            where = f"optimizer {type(optimizer).__name__}"
            yield from _hooks_of(optimizer, where, _OF_OPTIMIZERS)
        for where, module in self._trained.named_modules():
            yield from _hooks_of(module, where, _OF_MODULES)
        for path, parameter in self._trained.named_parameters():
            yield from _hooks_of(parameter, f"parameter {path}", _OF_PARAMETERS)


def _hooks_of(owner: object, where: str, kinds: Mapping[str, str]) -> Iterator[_Hook]:
    for name, kind in kinds.items():
        # Parameters have None before their first hook, and what only looks like an optimizer has
        # no such attribute.
        hooks: Hooks | None = getattr(owner, name, None)
        if hooks:
            yield from _hooks_in(hooks, f"{kind} of {where}")


def _hooks_in(hooks: Hooks, place: str) -> Iterator[_Hook]:
    for number, hook in hooks.items():
        if not _is_graph_safe(hook):
            yield _Hook(hooks, number, place)


def _is_graph_safe(hook: Callable[..., object]) -> bool:
    """True if ``hook`` comes from a package whose hooks a graph may hold."""
    while isinstance(hook, partial):
        hook = hook.func
    # An instance that is called has its class's.
    return (getattr(hook, "__module__", None) or "").startswith(_GRAPH_SAFE)
