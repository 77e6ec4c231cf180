"""The memory from which cuDNN draws the dropout of recurrent layers.

torch's generator of the device only begins it, and no function of torch returns it. The operation
that draws is given it as an argument, which the dispatcher shows.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.called_modules import called_from_python

if TYPE_CHECKING:
    from torch._ops import OpOverload


class DropoutStates:
    """The states that recurrent layers have drawn dropout from in :meth:`observed`.

    They are held, since graphs go on drawing from them where a seed has torch make another one.

    Args:
        trained: modules, whose layers are those that they have when they are observed.
    """

    def __init__(self, trained: TrainedModules) -> None:
        self._trained = trained
        self._states: dict[int, Tensor] = {}
        """States by their address."""

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """A context for calls of the modules, whose layers' states are known from then on."""
        active: list[_Arguments] = []

        def begin(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            del layer, arguments
            active.append(_Arguments(self._states))
            active[-1].__enter__()

        def end(layer: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
            del layer, arguments, output
            active.pop().__exit__(None, None, None)

        hooks: list[torch.utils.hooks.RemovableHandle] = []
        for module in _seen(self._trained):
            if _draws(module):
                hooks.append(module.register_forward_pre_hook(begin, prepend=True))
                # Also where the layer raises.
                hooks.append(module.register_forward_hook(end, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def saved(self) -> Callable[[], None]:
        """A function that puts the known states back to what they hold now."""
        states = [(state, state.clone()) for state in self._states.values()]

        def restore() -> None:
            for state, before in states:
                state.copy_(before)

        return restore


def draws_unseen(trained: TrainedModules) -> bool:
    """True where recurrent layers draw dropout within compiled code, in which nobody observes from
    what."""
    seen = set(_seen(trained))
    return any(_draws(module) and module not in seen for module in trained.modules())


def _seen(trained: TrainedModules) -> list[nn.Module]:
    roots = [root for root in (trained.model, trained.loss) if root is not None]
    return [module for root in roots for _, module in called_from_python(root)]


def _draws(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.dropout > 0


class _Arguments(TorchDispatchMode):
    """Notes the dropout states that operations within it are given."""

    def __init__(self, states: dict[int, Tensor]) -> None:
        super().__init__()
        self._states = states

    def __torch_dispatch__(
        self,
        func: "OpOverload",
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        state = given.get("dropout_state", kwargs.get("dropout_state"))
        if isinstance(state, Tensor):
            self._states.setdefault(state.data_ptr(), state)
        return func(*args, **kwargs)
