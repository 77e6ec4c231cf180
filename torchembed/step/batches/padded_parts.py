"""Parts of batches that steps take with room for padding, so that one captured step serves many."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from torchembed.core.trees import Tree, map_leaves, nodes_by_path, tensors_in
from torchembed.modules.counted_tensor import CountedTensor
from torchembed.step.batches.batch_layout import is_part, map_parts, with_sparse_features
from torchembed.step.batches.counted_parts import CountedParts, Rooms, part_at, steps_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Padding:
    """Padding of a part of a batch along its last dimension: the value, and the length.

    Raises:
        TypeError, ValueError: for a value that is no number, or a length below 1.
    """

    value: float
    """The value of columns that the batch does not have; the model must ignore them."""
    length: int | None = None
    """Columns ``[..., length]``; longer batches are left as they are. None for the longest batch so
    far, beyond which a model may have no positions."""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise TypeError(f"value must be a number, got {type(self.value).__name__}")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, or None, got {self.length}")


Pad: TypeAlias = Mapping[str, float | Padding]
"""For paths to tensors of a batch, as ``"items"`` or ``"inputs.items"``, the value or more."""


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch with room for padding."""

    form: Tree
    """The batch with tensors of other memory, of the padded shapes, in the place of padded parts,
    and with a :class:`~torchembed.step.batches.counted_parts.CountedPart` for a counted one."""
    source: Tree
    """A tree like ``form``, of the tensors of the batch itself."""
    values: Mapping[int, float]
    """For the number of each padded tensor among those of :func:`with_sparse_features` of
    ``source``, what it is padded with."""
    has_spare: bool
    """True where a part is shorter than its form."""
    counted: Mapping[str, Tensor]
    """The counted parts as they were given, by their names."""

    def filled(self, device: torch.device) -> Tree:
        """The batch on ``device`` with its parts padded, in memory of their own."""
        given, forms = (tensors_in(with_sparse_features(t)) for t in (self.source, self.form))
        filled = {
            id(given[n]): F.pad(given[n], (0, forms[n].shape[-1] - given[n].shape[-1]), value=value)
            for n, value in self.values.items()
        }
        return map_leaves(lambda part: filled.get(id(part), part).to(device), self.source, is_part)

    def as_given(self, result: Tree) -> Tree:
        """``result``, the batch of a step, with counted parts as they were given."""
        if not self.counted:
            return result
        return map_leaves(lambda tensor: self.counted[tensor.part], result, _is_counted)


def _is_counted(node: object) -> TypeGuard[CountedTensor]:
    return isinstance(node, CountedTensor)


class PaddedParts:
    """The parts of batches that are padded, and their lengths so far.

    Args:
        pad: parts that the caller has padded, and with what.

    Attributes:
        counted: parts that are padded since lookups alone read them.
        num_read: number of batches that :meth:`padded` was called for.

    Raises:
        TypeError, ValueError: if ``pad`` is no mapping from paths to values.
    """

    def __init__(self, pad: Pad) -> None:
        if not isinstance(pad, Mapping):
            raise TypeError(
                "pad must be a mapping from parts of a batch to values, as {'items': 0}, got "
                f"{type(pad).__name__}"
            )
        self._parts: dict[str, tuple[Sequence[str], Padding]] = {}
        for path, padding in pad.items():
            steps = steps_of(path)
            if not steps:
                raise TypeError(
                    "pad must name parts of a batch by their path, as 'items' or 'inputs.items', "
                    f"got {path!r}"
                )
            given = padding if isinstance(padding, Padding) else Padding(value=padding)
            self._parts[path] = (steps[1:] if steps[0] == "batch" and steps[1:] else steps), given
        self._lengths: dict[str, int] = {}
        self._rooms = Rooms()
        self.counted = CountedParts()
        self.num_read = self._changes = 0

    @property
    def changes(self) -> int:
        """The number of changes of what is padded, or to which length: batches have other forms
        after each."""
        return self._changes + self.counted.changes

    def refuse(self) -> bool:
        """Pad counted parts no longer, or, where there are none, those of the caller.

        Returns:
            True where the caller's are no longer padded.
        """
        if self.counted.are_known:
            self.counted.refuse()
            return False
        self._parts = {}
        self._changes += 1
        return True

    def padded(self, batch: Tree) -> PaddedBatch | None:
        """``batch`` with room for padding; None where it has no such parts, or longer ones.

        Raises:
            ValueError, TypeError: if a part that the caller has padded is not there, no tensor
                with a dimension, or of a dtype that does not have the value.
        """
        self.num_read += 1
        if not self._parts and not self.counted.are_known:
            return None
        forms: dict[int, Tree] = {}
        sources: dict[int, Tree] = {}
        values: dict[int, float] = {}
        counted: dict[str, Tensor] = {}
        has_spare = False
        for path, tensor, padding in self._found(batch):
            length = tensor.shape[-1]
            if padding.length is not None and length > padding.length:
                return None
            longest = padding.length or self._lengths.get(path, 0)
            if length > longest:
                self._changes += path in self._lengths
                self._lengths[path] = longest = length
            has_spare = has_spare or length < longest
            forms[id(tensor)] = self._rooms.of(path, tensor, longest)
            values[id(tensor)] = padding.value
        for part, form in self.counted.found(batch):
            tensor = part.elements
            if id(tensor) not in forms:
                forms[id(tensor)] = form
                sources[id(tensor)] = part
                values[id(tensor)], counted[part.name], has_spare = 0, tensor, True
        if not forms:
            return None
        form = map_parts(lambda part: part, lambda part: forms.get(id(part), part), batch)
        source = batch
        if sources:
            source = map_parts(lambda part: part, lambda part: sources.get(id(part), part), batch)
        tensors = enumerate(tensors_in(with_sparse_features(source)))
        of_number = {number: values[id(t)] for number, t in tensors if id(t) in values}
        return PaddedBatch(form, source, of_number, has_spare, counted)

    def _found(self, batch: Tree) -> Iterator[tuple[str, Tensor, Padding]]:
        for path, (steps, padding) in self._parts.items():
            try:
                part = part_at(batch, steps)
            except (LookupError, AttributeError):
                there = ", ".join(f"batch{found}" for found in nodes_by_path(batch, is_part))
                raise ValueError(
                    f"pad names {path!r}, which the batch does not have; its parts are {there}"
                ) from None
            if part is None:
                continue
            if not isinstance(part, Tensor) or part.dim() == 0:
                what = "a number []" if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise TypeError(
                    f"pad names {path!r}, which must be a tensor with a dimension to pad, got "
                    f"{what}; name a tensor of the batch"
                )
            if not part.is_floating_point() and padding.value != int(padding.value):
                raise ValueError(
                    f"pad must give a value that {part.dtype} has for {path!r}, got {padding.value}"
                )
            yield path, part, padding
