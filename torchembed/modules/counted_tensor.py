"""Tensors with spare elements behind those of a batch, which lookups alone may read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

_PROPERTIES = ("device", "dtype", "is_cuda", "layout", "ndim", "requires_grad")
_HARMLESS = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES] + [Tensor.dim, Tensor.is_floating_point]
)
"""Functions whose results tell nothing of the number of elements."""
_CONVERSIONS = frozenset([Tensor.to, Tensor.long, Tensor.int, Tensor.float, Tensor.contiguous])
"""Functions that give a tensor itself where it is of the form that is asked for already."""


class CountedTensor(Tensor):
    """Ids or weights ``[C]`` of a batch, of which the device alone knows how many are the batch's.

    A captured step gives it to a model in the place of a tensor whose length varies.
    ``EmbeddingBag`` takes it as the tensor without the spare elements. All else that reads it, or
    asks for its length, raises, so that no model computes with elements that are not there.

    Attributes:
        elements: ``[C]``; what is behind the batch's may be anything that is a valid id.
        count: int64 ``[1]``, the number of the batch's.
        part: the name of the part of the batch that it is.
    """

    elements: Tensor
    count: Tensor
    part: str

    @classmethod
    def of(cls, elements: Tensor, count: Tensor, part: str) -> Self:
        """``elements``, of which the first ``count`` are the batch's."""
        counted = torch.Tensor._make_subclass(cls, elements.detach())
        counted.elements, counted.count, counted.part = elements, count, part
        return counted

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HARMLESS or func in _CONVERSIONS:
            with torch._C.DisableTorchFunctionSubclass():
                outcome = func(*args, **(kwargs or {}))
            if func in _HARMLESS or outcome is args[0]:
                return outcome
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} reads ids or weights of which a captured step has "
            "spare ones; EmbeddingBag alone may take them"
        )


def elements_of(tensor: Tensor | None) -> Tensor | None:
    """``tensor``, with its spare elements where it is counted."""
    return tensor.elements if isinstance(tensor, CountedTensor) else tensor
