"""Stand-ins, that is fake and functional tensors, and caches that hold none of them.

Tensors that are made inside ``FakeTensorMode``, ``torch.export`` and transforms such as
``torch.func.grad`` stand for tensors of a later call, or of a level of the transform that ends.
Objects that outlive the call, caches above all, may not hold one.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torchembed.core.trees import tensors_in

_PLAIN = (Tensor, nn.Parameter)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def is_stand_in(tensor: Tensor) -> bool:
    """True for a tensor that has no elements of its own: fake, functional, or wrapped by a
    transform of ``torch.func``."""
    if type(tensor) not in _PLAIN:
        return True
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
    return in_transform() and is_wrapped(tensor)


def address_of(tensor: Tensor) -> int:
    """The address of the first element of ``tensor``; 0 for a stand-in, which has none."""
    return tensor.data_ptr() if type(tensor) in _PLAIN else 0


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`address_of` each of ``tensors``."""
    return [tensor.data_ptr() if type(tensor) in _PLAIN else 0 for tensor in tensors]


def in_transform() -> bool:
    """True inside a transform of ``torch.func``, as ``grad`` or ``vmap``."""
    # Dynamo traces transforms itself, and cannot trace the question.
    return not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active()


def makes_stand_ins() -> bool:
    """True where newly made tensors may be stand-ins."""
    return not torch.compiler.is_dynamo_compiling() and (
        in_transform() or type(torch.empty(0, device="cpu")) is not Tensor
    )


@contextlib.contextmanager
def making_real_tensors() -> Iterator[None]:
    """Context in which new tensors are real, whatever mode or transform the call is inside of."""
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


class KeptTensors(Generic[K, V]):
    """Cache of trees of tensors by key, each made once; trees with stand-ins are not kept.

    Args:
        limit: the number of trees kept; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._kept: dict[K, V] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    @property
    def is_full(self) -> bool:
        """True where no further tree will be kept."""
        return len(self._kept) == self._limit

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value kept under ``key``, or else that of ``make()``, which is kept from then on."""
        if key in self._kept:
            return self._kept[key]
        made = make()
        if not self.is_full and not any(map(is_stand_in, tensors_in(made))):
            self._kept[key] = made
        return made
