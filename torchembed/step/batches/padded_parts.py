"""Parts of batches that steps take with room for padding, so that one captured step serves many."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from torchembed.core.trees import Tree, nodes_by_path, tensors_in
from torchembed.step.batches.batch_layout import is_part, map_parts, with_sparse_features

_STEP = re.compile(r"[^.\[\]'\"]+")
"""A step of a path to a part of a batch: a name, a key or a number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Padding:
    """What a part of a batch is padded with along its last dimension, and to which length.

    Raises:
        TypeError, ValueError: for a value that is no number, or a length below 1.
    """

    value: float
    """In columns that the batch does not have; the model must ignore them."""
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


class PaddedBatch(NamedTuple):
    """A batch with room for padding.

    Attributes:
        form: the batch with tensors of other memory, of the padded shapes, in the place of parts
            that are padded.
        values: for the number of each such tensor among those of :func:`with_sparse_features` of
            the batch, what it is padded with.
        has_spare: whether a part is shorter than its form.
        has_grown: whether a part is longer than all before.
    """

    form: Tree
    values: Mapping[int, float]
    has_spare: bool
    has_grown: bool

    def filled(self, batch: Tree) -> Tree:
        """``batch``, which this is the form of, with its parts padded, in memory of their own."""
        given, forms = (tensors_in(with_sparse_features(tree)) for tree in (batch, self.form))
        filled = {
            id(given[n]): F.pad(given[n], (0, forms[n].shape[-1] - given[n].shape[-1]), value=value)
            for n, value in self.values.items()
        }
        return map_parts(lambda part: part, lambda part: filled.get(id(part), part), batch)


class PaddedParts:
    """The parts of batches that are padded, and their lengths so far.

    Args:
        pad: the parts.

    Raises:
        TypeError, ValueError: where it is no mapping from paths to values.
    """

    def __init__(self, pad: Pad) -> None:
        if not isinstance(pad, Mapping):
            raise TypeError(
                "pad must be a mapping from parts of a batch to values, as {'items': 0}, got "
                f"{type(pad).__name__}"
            )
        self._parts: dict[str, tuple[Sequence[str], Padding]] = {}
        for path, padding in pad.items():
            steps = _STEP.findall(path) if isinstance(path, str) else []
            if not steps:
                raise TypeError(
                    "pad must name parts of a batch by their path, as 'items' or 'inputs.items', "
                    f"got {path!r}"
                )
            given = padding if isinstance(padding, Padding) else Padding(value=padding)
            self._parts[path] = (steps[1:] if steps[0] == "batch" and steps[1:] else steps), given
        self._lengths: dict[str, int] = {}

    def padded(self, batch: Tree) -> PaddedBatch | None:
        """``batch`` with room for padding; None where it has none of the parts, or longer ones.

        Raises:
            ValueError, TypeError: where a part is not there, no tensor with a dimension, or of a
                dtype that does not have the value.
        """
        forms: dict[int, Tensor] = {}
        values: dict[int, float] = {}
        has_spare = has_grown = False
        for path, tensor, padding in self._found(batch):
            length = tensor.shape[-1]
            if padding.length is not None and length > padding.length:
                return None
            longest = padding.length or self._lengths.get(path, 0)
            if length > longest:
                has_grown = path in self._lengths
                self._lengths[path] = longest = length
            has_spare = has_spare or length < longest
            forms[id(tensor)] = tensor.new_zeros(()).expand(*tensor.shape[:-1], longest)
            values[id(tensor)] = padding.value
        if not forms:
            return None
        form = map_parts(lambda part: part, lambda part: forms.get(id(part), part), batch)
        tensors = enumerate(tensors_in(with_sparse_features(batch)))
        of_number = {number: values[id(t)] for number, t in tensors if id(t) in values}
        return PaddedBatch(form, of_number, has_spare, has_grown)

    def _found(self, batch: Tree) -> Iterator[tuple[str, Tensor, Padding]]:
        for path, (steps, padding) in self._parts.items():
            part = _part_of(batch, steps, path)
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


def _part_of(batch: Tree, steps: Sequence[str], path: str) -> object:
    part = batch
    for step in steps:
        try:
            if isinstance(part, Mapping):
                part = part[step]
            elif step.isdigit() and isinstance(part, (tuple, list)):
                part = part[int(step)]
            else:
                part = getattr(part, step)
        except (KeyError, IndexError, AttributeError):
            there = ", ".join(f"batch{found}" for found in nodes_by_path(batch, is_part))
            raise ValueError(
                f"pad names {path!r}, which the batch does not have; its parts are {there}"
            ) from None
    return part
