"""Methods that Python code has put in the place of classes' own, which a replay would not call."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchembed.optim.joint import separate
from torchembed.step.step_optimizers import follows_replays

LIBRARIES = ("torch.", "torchembed.", "torchrec.", "fbgemm_gpu.")
"""Packages whose methods do nothing at a step but what a graph repeats."""


class ReplacedMethod(NamedTuple):
    """A method that no graph can call."""

    method: object
    place: str
    """The method's name and what it belongs to."""

    def __str__(self) -> str:
        named = getattr(self.method, "__qualname__", type(self.method).__qualname__)
        return f"{named} ({self.place})"


class ReplacedMethods:
    """Finds ``forward`` of modules and ``step`` and ``zero_grad`` of optimizers that Python code of
    others has replaced or overridden.

    A ``forward`` counts where it was assigned to a module in place of its class's, where one of a
    library's classes comes from elsewhere, and where a class's was replaced since construction.
    An optimizer's ``step`` counts where the optimizer is stepped in graphs.

    Args:
        model: whose modules are looked at.
        optimizers: as the caller gave them.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        kinds = dict.fromkeys(type(module) for module in model.modules())
        self._own = {kind: forward_of(kind) for kind in kinds}

    def find(self) -> Iterator[ReplacedMethod]:
        """The methods that are replaced now."""
        for path, module in self._model.named_modules():
            if _is_assigned_by_others(module):
                where = f"module {path}" if path else f"model {type(module).__name__}"
                yield ReplacedMethod(vars(module)["forward"], f"assigned to forward of {where}")
        for kind in dict.fromkeys(type(module) for module in self._model.modules()):
            forward = forward_of(kind)
            own = self._own.setdefault(kind, forward)
            if forward is not own or (_is_of_library(kind) and _is_others(forward)):
                yield ReplacedMethod(forward, f"in place of {kind.__name__}.forward")
        for optimizer in dict.fromkeys((*self._optimizers, *separate(self._optimizers))):
            names = ("step", "zero_grad") if follows_replays(optimizer) else ("zero_grad",)
            for name in names:
                method = vars(optimizer).get(name, getattr(type(optimizer), name, None))
                if _is_others(method):
                    place = f"{name} of optimizer {type(optimizer).__name__}"
                    yield ReplacedMethod(method, place)


def forward_of(kind: type[nn.Module]) -> object:
    """The function that a class of modules has as ``forward``, not bound to anything."""
    return next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))


def _is_of_library(kind: type[nn.Module]) -> bool:
    definer = next(base for base in kind.__mro__ if "forward" in vars(base))
    return definer.__module__.startswith(LIBRARIES)


def _is_assigned_by_others(module: nn.Module) -> bool:
    assigned, inner = None, vars(module).get("forward")
    while inner is not None:
        assigned = inner
        # What torch.compile gives for a function has it under this name.
        of_method = getattr(assigned, "__func__", None)
        inner = of_method or getattr(assigned, "_torchdynamo_orig_callable", None)
    return assigned is not forward_of(type(module)) and _is_others(assigned)


def _is_others(method: object) -> bool:
    """True for code that is of no library; a library's decorators are looked through."""
    while isinstance(method, partial):
        method = method.func
    while method is not None:
        method = getattr(method, "__func__", method)
        # Not __module__, which a wrapper takes over from what it wraps. Generated code has none.
        of_code: dict[str, Any] | None = getattr(method, "__globals__", None)
        module = type(method).__module__ if of_code is None else of_code.get("__name__", "torch.")
        if module != "builtins" and not f"{module}.".startswith(LIBRARIES):
            return True
        method = getattr(method, "__wrapped__", None)
    return False
