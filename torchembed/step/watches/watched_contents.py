"""NumPy arrays and tensors of the host, which a model may change in place: they stay the same
objects, and a CUDA graph holds the numbers that forward made of them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from torchembed.step.stages import Reason
from torchembed.step.watches.read_values import MAX_ITEMS

MAX_BYTES = 1 << 14
"""The most bytes of arrays that are compared at each step, which takes a microsecond."""
_TOO_LARGE = Reason(
    "forward reads an array that is too large to be looked at in each step, and that may be "
    "changed in place, which no graph follows; make it read-only by its setflags(write=False), or "
    "hold it in a buffer"
)
_OF_OBJECTS = Reason(
    "forward reads an array of objects, whose changes no graph follows; hold them in a list"
)


class WatchedContents:
    """The contents of NumPy arrays, and versions of tensors of the host.

    Arrays that are read-only, with all that they are views of, are left out, and tensors where
    steps run on the host too, since replays read these where they are.

    Args:
        named: values by their names in warnings; of a list or tuple among them, its items.
        device: of the steps.

    Attributes:
        unwatchable: the first array that cannot be compared at each step; None without one.
    """

    def __init__(self, named: Mapping[str, object], device: torch.device) -> None:
        self.unwatchable: Reason | None = None
        self._arrays: list[tuple[str, np.ndarray]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        num_bytes, seen = 0, set[int]()
        for name, value in named.items():
            for number, item in enumerate(_items_of(value)):
                if id(item) in seen:
                    continue
                seen.add(id(item))
                known = name if item is value else f"item {number} of {name}"
                if isinstance(item, np.ndarray) and _may_change(item):
                    num_bytes += item.nbytes
                    why = _OF_OBJECTS if item.dtype.hasobject else None
                    why = _TOO_LARGE if num_bytes > MAX_BYTES else why
                    if why is None:
                        self._arrays.append((known, item))
                    else:
                        num_bytes -= item.nbytes
                        self.unwatchable = self.unwatchable or why._replace(where=known)
                elif device.type != "cpu" and isinstance(item, Tensor) and _counts_changes(item):
                    self._tensors.append((known, item))
        self._before = self._now()

    def _now(self) -> list[bytes | int]:
        versions = (tensor._version for _, tensor in self._tensors)
        return [*(array.tobytes() for _, array in self._arrays), *versions]

    @property
    def have_changed(self) -> bool:
        """True if an array or a tensor was changed in place since this object was made."""
        return (bool(self._arrays) or bool(self._tensors)) and self._now() != self._before

    def named(self) -> Iterator[tuple[str, object]]:
        """The contents when this object was made, by names in warnings."""
        names = [name for name, _ in (*self._arrays, *self._tensors)]
        return ((f"contents of {n}", now) for n, now in zip(names, self._before, strict=True))


def _counts_changes(tensor: Tensor) -> bool:
    """True for a tensor of the host whose version tells that it was changed, and that no optimizer
    changes."""
    return tensor.device.type == "cpu" and not (tensor.requires_grad or tensor.is_inference())


def small_arrays_in(value: object) -> list[np.ndarray]:
    """NumPy arrays among ``value`` and its items, that are compared at each step."""
    arrays = (item for item in _items_of(value) if isinstance(item, np.ndarray))
    return [a for a in arrays if a.flags.writeable and a.nbytes <= MAX_BYTES]


def _items_of(value: object) -> Iterable[object]:
    return islice(value, MAX_ITEMS) if isinstance(value, (list, tuple)) else (value,)


def _may_change(array: np.ndarray) -> bool:
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return False
