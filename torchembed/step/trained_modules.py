"""The modules that a step trains: the model, and a loss function that is a module of its own."""

import types
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from torchembed.step.watches.read_values import called_for_loss


def module_of_loss(model: nn.Module, loss_fn: object) -> nn.Module | None:
    """The module that ``loss_fn`` of a pipeline is, or whose method it is.

    Returns:
        None where it is none, or where ``model`` holds it.
    """
    called = called_for_loss(loss_fn)
    if isinstance(called, types.MethodType):
        called = called.__self__
    is_alone = isinstance(called, nn.Module) and all(called is not m for m in model.modules())
    return called if isinstance(called, nn.Module) and is_alone else None


class TrainedModules(NamedTuple):
    """A model, and its loss function where that is a module which the model does not hold.

    Each method gives what either holds, once, as those of ``nn.Module`` do.
    """

    model: nn.Module
    loss: nn.Module | None

    @classmethod
    def of(cls, model: nn.Module, loss_fn: object) -> "TrainedModules":
        """Those of a pipeline with ``loss_fn``."""
        return cls(model, module_of_loss(model, loss_fn))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules by their names in warnings."""
        seen = set[nn.Module]()
        for root, what in ((self.model, "model"), (self.loss, "loss function")):
            of_loss = " of the loss function" if root is self.loss else ""
            for path, module in () if root is None else root.named_modules(seen):
                yield (
                    f"module {path}{of_loss}" if path else f"{what} {type(module).__name__}",
                    module,
                )

    def modules(self) -> list[nn.Module]:
        """Modules, those of the model first."""
        return [module for _, module in self.named_modules()]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by their paths."""
        seen = set[Tensor]()
        for root in (self.model, self.loss):
            of_loss = " of the loss function" if root is self.loss else ""
            for path, parameter in () if root is None else root.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield f"{path}{of_loss}", parameter

    def parameters(self) -> list[Tensor]:
        """Parameters, those of the model first."""
        return [parameter for _, parameter in self.named_parameters()]

    def buffers(self) -> list[Tensor]:
        """Buffers, those of the model first."""
        roots = (self.model, self.loss)
        return [buffer for root in roots if root is not None for buffer in root.buffers()]
