"""Dense parameters of a TorchRec model, trained beside ``DistributedDataParallel``.

Its hooks would reduce gradients on streams and at times of their own, which no graph can hold. So
steps compute with leaves of their own over the same memory, and hand gradients over.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.autograd.gradient_slots import GradientSlot
from torchembed.sharding.transport.ranks import Ranks

_BUCKET_BYTES = 1 << 24
"""Gradients in float32 are many bytes, of which NCCL reduces small portions slowly."""


class Leaf(NamedTuple):
    """A parameter, and what stands for it in steps."""

    parameter: Tensor
    """The model's, that its optimizer knows."""
    own: nn.Parameter

    def follow(self) -> None:
        """Take over where the parameter lies, and whether it trains."""
        parameter, own = self
        if own.data_ptr() != parameter.data_ptr():
            own.data = parameter.data
        if own.requires_grad != parameter.requires_grad:
            own.requires_grad_(parameter.requires_grad)


class DenseParameters:
    """The dense parameters of a model and its tables that every rank holds.

    Args:
        named: the dense ones, by every name that they have in the model.
        replicated: those of tables.
        averaged: of both, the ones whose gradients are the mean over ranks.
        ranks: which take it.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        replicated: Iterable[Leaf],
        averaged: Iterable[Tensor],
        ranks: Ranks,
    ) -> None:
        owns = {p: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in named.values()}
        self._dense = [Leaf(parameter, own) for parameter, own in owns.items()]
        self.leaves = [*self._dense, *replicated]
        self.by_name: dict[str, Tensor] = {
            name: owns[parameter] for name, parameter in named.items()
        }
        """What a model is called with in place of its own."""
        wanted = set(averaged)
        of_mean = [leaf.own for leaf in self.leaves if leaf.parameter in wanted]
        _give_slots([leaf.own for leaf in self._dense])
        if of_mean:
            ranks.average(of_mean, bucket_bytes=_BUCKET_BYTES)

    def follow(self) -> None:
        """Before a step: take over what was changed in the model."""
        for leaf in self._dense:
            leaf.follow()


_ALIGNMENT = 128
"""Elements between the beginnings of gradients, as cuBLAS likes it."""


def _give_slots(parameters: Sequence[nn.Parameter]) -> None:
    """Have gradients lie side by side, where their mean can be taken without a copy."""
    together: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in filter(torch.is_floating_point, parameters):
        together.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for (device, dtype), same in together.items():
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in same]
        flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
        for parameter, size, end in zip(same, sizes, itertools.accumulate(sizes), strict=True):
            GradientSlot(parameter, flat, end - size, end)


class OptimizerOfLeaves:
    """Steps the user's optimizer by the gradients of leaves, as a pipeline of ours has it do.

    It has the parts of a ``torch.optim.Optimizer`` that a pipeline uses.

    Args:
        optimizer: the user's.
        leaves: all of them.
        updated: those that something else updates before; the optimizer gets no gradient of these.
    """

    def __init__(self, optimizer: Any, leaves: Iterable[Leaf], updated: Iterable[Leaf]) -> None:
        self._optimizer, self._leaves = optimizer, list(leaves)
        left_out = {leaf.own for leaf in updated}
        self._stepped = [leaf for leaf in self._leaves if leaf.own not in left_out]
        self.param_groups = [{"params": [leaf.own for leaf in self._leaves]}]
        self._are_clear = False

    @property
    def state(self) -> dict[Tensor, Any]:
        """Of each leaf, the user's."""
        state = self._optimizer.state
        return {leaf.own: state.get(leaf.parameter, {}) for leaf in self._stepped}

    def zero_grad(self) -> None:
        for leaf in self._leaves:
            leaf.own.grad = leaf.parameter.grad = None
        self._are_clear = True

    def step(self) -> None:
        """
        Raises:
            RuntimeError: where the model has not computed with the leaves.
        """
        if self._are_clear and any(leaf.parameter.grad is not None for leaf in self._leaves):
            raise RuntimeError(
                "the model must compute with the parameters that are registered in its modules, "
                "but one got a gradient otherwise; look it up by self.<name> in forward, or train "
                "by TorchRec's pipeline"
            )
        for leaf in self._stepped:
            leaf.parameter.grad = leaf.own.grad
        self._are_clear = False
        self._optimizer.step()
        for leaf in self._leaves:
            leaf.parameter.grad = leaf.own.grad
