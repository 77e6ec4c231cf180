"""Parts of batches that lookups of ids between offsets read, and nothing else: captured steps may
have spare elements behind them."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from torchembed.core.trees import Tree, map_leaves, nodes_by_path, tensors_in
from torchembed.modules.calls_ahead import CallArguments, KnownTensors
from torchembed.modules.counted_tensor import CountedTensor
from torchembed.modules.embedding import EmbeddingBag
from torchembed.modules.sharded.sharded_single_table import ShardedEmbeddingBag
from torchembed.step.batches.batch_layout import is_part, is_unchangeable, sparse_features

_HEADROOM = 1.25
"""The capacity is so many times what a batch needs that outgrows it, so that few captures serve
batches of any size."""
_ROUND_TO = 256
_STEP = re.compile(r"[^.\[\]'\"]+")
"""A step of a path to a part of a batch: a name, a key or a number."""


def with_headroom(needed: int, before: int) -> int:
    """The capacity for what is ``needed``, where it was ``before``."""
    if needed <= before:
        return before
    return _ROUND_TO * math.ceil(_HEADROOM * needed / _ROUND_TO)


def steps_of(path: object) -> Sequence[str]:
    """The names, keys and numbers of a path to a part of a batch; none where it is no path."""
    return _STEP.findall(path) if isinstance(path, str) else []


def part_at(batch: Tree, steps: Sequence[str]) -> object:
    """The part of ``batch`` at ``steps``.

    Raises:
        LookupError, AttributeError: if there is none.
    """
    part = batch
    for step in steps:
        if isinstance(part, Mapping):
            part = part[step]
        elif step.isdigit() and isinstance(part, (tuple, list)):
            part = part[int(step)]
        else:
            part = getattr(part, step)
    return part


class CountedPart(NamedTuple):
    """A part of a batch with spare elements behind it, in the tree of the batch."""

    elements: Tensor
    """``[L]`` as the batch has them, or ``[C]`` with spare ones."""
    count: Tensor
    """int64 ``[1]``: the number of the batch's."""
    name: str


def _is_counted(node: object) -> TypeGuard[CountedPart]:
    return isinstance(node, CountedPart)


def for_model(batch: Tree) -> Tree:
    """``batch`` as a model is given it: in containers of its own, since models may add parts or
    take them out, and with tensors that lookups alone may read in the place of counted parts."""

    if is_unchangeable(batch):
        return batch

    def function(part: Any) -> Tree:
        return CountedTensor.of(*part) if _is_counted(part) else part

    return map_leaves(function, batch, lambda node: _is_counted(node) or is_part(node))


class Rooms:
    """Tensors that have the shapes of parts with room for padding, and no memory to speak of."""

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}

    def of(self, path: str, tensor: Tensor, length: int) -> Tensor:
        """The one for the part ``tensor`` at ``path``, with ``length`` columns."""
        shape, room = (*tensor.shape[:-1], length), self._known.get(path)
        is_alike = room is not None and room.dtype is tensor.dtype and room.shape == shape
        if room is None or not is_alike or room.device != tensor.device:
            room = self._known[path] = tensor.new_empty(()).expand(shape)
        return room


class CountedParts:
    """The parts of batches that lookups alone read, and how many elements captured steps have for
    them, once their lengths vary.

    Attributes:
        changes: counts the changes of those numbers.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Sequence[str]] = {}
        self._sizes: dict[str, int] = {}
        """The length that each had, until lengths vary; then its capacity."""
        self._rooms = Rooms()
        self._is_refused = self._do_vary = False
        self.changes = 0

    @property
    def are_known(self) -> bool:
        """True if there are any."""
        return bool(self._parts)

    def refuse(self) -> None:
        """Have none from now on."""
        self._parts, self._is_refused = {}, True
        self.changes += 1

    def note(self, batch: Tree, tensors: Sequence[Tensor]) -> None:
        """Note that lookups have read ``tensors`` of ``batch``, and checked reading of others."""
        paths = {id(part): path for path, part in nodes_by_path(batch, is_part).items()}
        for tensor in tensors:
            path = paths.get(id(tensor), "")
            steps = steps_of(path)
            # Keys with dots or brackets lead elsewhere.
            with contextlib.suppress(LookupError, AttributeError):
                if steps and path not in self._parts and part_at(batch, steps) is tensor:
                    self._parts[path], self._sizes[path] = steps, len(tensor)

    def found(self, batch: Tree) -> Iterator[tuple[CountedPart, CountedPart]]:
        """Each counted part of ``batch``, and one of the shape that steps take."""
        if any(getattr(features, "hotness", None) is None for features in sparse_features(batch)):
            return  # other engines train it
        tensors: dict[str, Tensor] = {}
        for path, steps in self._parts.items():
            with contextlib.suppress(LookupError, AttributeError):
                part = part_at(batch, steps)
                if isinstance(part, Tensor) and part.dim() == 1:
                    tensors[path] = part
        if not self._do_vary:
            self._do_vary = any(len(t) != self._sizes[path] for path, t in tensors.items())
            if not self._do_vary:
                return
            self._sizes = dict.fromkeys(self._sizes, 0)
        for path, tensor in tensors.items():
            size = with_headroom(len(tensor), self._sizes[path])
            self.changes += size != self._sizes[path]
            self._sizes[path] = size
            part = CountedPart(tensor, torch.tensor([len(tensor)]), path)
            yield part, part._replace(elements=self._rooms.of(path, tensor, size))

    @contextlib.contextmanager
    def observed(self, model: nn.Module, batch: Tree) -> Iterator[None]:
        """A context for a step on ``batch``, which notes the parts that lookups between offsets
        read."""
        if self._is_refused:
            yield
            return
        tensors = tensors_in(batch)
        known = KnownTensors(tensors)
        read: dict[int, Tensor] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = dict(zip(CallArguments._fields, args, strict=False)) | kwargs
            ids, offsets = names.get("input"), names.get("offsets")
            weights = names.get("per_sample_weights")
            given = [tensor for tensor in (ids, weights) if tensor is not None]
            if offsets is None or any(type(t) is not Tensor or t.dim() != 1 for t in given):
                return
            if isinstance(module, ShardedEmbeddingBag) and (
                module.mode == "max"
                or module.include_last_offset
                or known.place_of(offsets) is None
            ):
                return  # its ids are exchanged in forward, which no graph holds where sizes vary
            places = [known.place_of(tensor) for tensor in given]
            wholes = [
                tensors[place.number]
                for tensor, place in zip(given, places, strict=True)
                if place is not None and tensors[place.number].shape == tensor.shape
            ]
            if len(wholes) == len(given):
                read.update((id(whole), whole) for whole in wholes)

        bags = [m for m in model.modules() if isinstance(m, (EmbeddingBag, ShardedEmbeddingBag))]
        hooks = [bag.register_forward_pre_hook(note, with_kwargs=True) for bag in bags]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.note(batch, list(read.values()))
