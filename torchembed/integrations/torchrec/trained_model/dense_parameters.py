"""Dense parameters of a TorchRec model, trained without ``DistributedDataParallel``'s hooks.

The hooks would reduce gradients on streams and at times of their own, which no CUDA graph can hold.
So steps compute with aliases: parameters over the same memory, whose gradients are then copied to
the model's own.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchembed.autograd.gradient_slots import GradientSlot
from torchembed.sharding.transport.table_ranks import TableRanks


class AliasedParameter(NamedTuple):
    """A parameter of the model, and the alias that steps compute with."""

    parameter: Tensor
    """The model's own, which its optimizer knows."""
    alias: nn.Parameter
    """A parameter over the same memory."""

    def refresh(self) -> None:
        """Point the alias to the parameter's current memory, and let it train where that does."""
        parameter, alias = self
        if alias.data_ptr() != parameter.data_ptr():
            alias.data = parameter.data
        if alias.requires_grad != parameter.requires_grad:
            alias.requires_grad_(parameter.requires_grad)


class DenseParameters:
    """Aliases of a model's dense parameters and of its data-parallel tables.

    Args:
        named: the dense parameters, under every name that they have in the model.
        replicated: the data-parallel tables, with the aliases that collections made of them.
        averaged: those of both whose gradients are averaged over ranks.
        ranks: the ranks to average over.

    Attributes:
        aliased: all of them, dense parameters first.
        aliases_by_name: for each name of a dense parameter, its alias.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        replicated: Iterable[AliasedParameter],
        averaged: Iterable[Tensor],
        ranks: TableRanks,
    ) -> None:
        aliases = {
            parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            for parameter in named.values()
        }
        self._dense = [AliasedParameter(parameter, alias) for parameter, alias in aliases.items()]
        self.aliased = [*self._dense, *replicated]
        self.aliases_by_name: dict[str, Tensor] = {
            name: aliases[parameter] for name, parameter in named.items()
        }
        to_average = set(averaged)
        of_mean = [pair.alias for pair in self.aliased if pair.parameter in to_average]
        _give_slots([pair.alias for pair in self._dense])
        if of_mean:
            ranks.average(of_mean)

    def refresh(self) -> None:
        """Before a step: bring the aliases up to date with the model's parameters."""
        for pair in self._dense:
            pair.refresh()


_ALIGNMENT = 128
"""Elements that the first of each gradient is aligned to; cuBLAS is faster so."""


def _give_slots(parameters: Sequence[nn.Parameter]) -> None:
    """Place gradients of one device and dtype in one tensor, whose mean needs no copy."""
    alike: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in filter(torch.is_floating_point, parameters):
        alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for (device, dtype), same in alike.items():
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in same]
        flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
        for parameter, size, end in zip(same, sizes, itertools.accumulate(sizes), strict=True):
            GradientSlot(parameter, flat, end - size, end)


class AliasedOptimizer:
    """Steps the user's optimizer by the gradients of aliases.

    It has the parts of a ``torch.optim.Optimizer`` that torchembed's pipeline uses.

    Args:
        optimizer: the user's.
        aliased: all of the aliased parameters.
        updated: those that something else updates before; the optimizer sees no gradient of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        aliased: Iterable[AliasedParameter],
        updated: Iterable[AliasedParameter],
    ) -> None:
        self._optimizer, self._aliased = optimizer, list(aliased)
        left_out = {pair.alias for pair in updated}
        self._stepped = [pair for pair in self._aliased if pair.alias not in left_out]
        self.param_groups = [{"params": [pair.alias for pair in self._aliased]}]
        self._are_clear = False

    @property
    def state(self) -> dict[Tensor, dict[str, object]]:
        """For each alias that the optimizer steps, the user's state of its parameter."""
        state = self._optimizer.state
        return {pair.alias: state.get(pair.parameter, {}) for pair in self._stepped}

    def zero_grad(self) -> None:
        """Drop the gradients of aliases and of parameters."""
        for pair in self._aliased:
            pair.alias.grad = pair.parameter.grad = None
        self._are_clear = True

    def step(self) -> None:
        """Give parameters their aliases' gradients and step the user's optimizer.

        Raises:
            RuntimeError: where the model has not computed with the aliases.
        """
        if self._are_clear and any(pair.parameter.grad is not None for pair in self._aliased):
            raise RuntimeError(
                "the model must compute with the parameters that are registered in its modules, "
                "but one got a gradient otherwise; look it up by self.<name> in forward, or train "
                "by TorchRec's pipeline"
            )
        for pair in self._stepped:
            pair.parameter.grad = pair.alias.grad
        self._are_clear = False
        self._optimizer.step()
        for pair in self._aliased:
            pair.parameter.grad = pair.alias.grad
