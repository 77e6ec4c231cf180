"""Calls of modules of one table that are noted, or answered by what was looked up before them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from torchembed.modules.single_table import SingleTable


class CallArguments(NamedTuple):
    """The arguments of ``EmbeddingBag.forward``, or of ``Embedding.forward``."""

    input: Tensor
    offsets: Tensor | None = None
    per_sample_weights: Tensor | None = None


class CallHandler(Protocol):
    """Sees each call of the modules that it was given to, as their ``calls_ahead``."""

    def __call__(self, module: "SingleTable", arguments: CallArguments, /) -> Tensor | None:
        """The result of the call; None where the module is to look it up."""
        ...


class TensorPlace(NamedTuple):
    """A tensor as part of the memory of one of a batch's tensors, whichever batch."""

    number: int
    """Position among the tensors of the batch."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the begin of the storage."""

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor of the batch with ``tensors``, a view."""
        return tensors[self.number].as_strided(self.shape, self.stride, self.offset)


class KnownTensors:
    """The tensors of a batch, by whose memory views of them are recognized.

    A view in a step that is repeated is the same view of the next batch in that memory. What was
    written in place since then is recognized, too, by the tensors' version counters.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._versions = [tensor._version for tensor in tensors]
        self._numbers = {
            tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(tensors)
        }

    def place_of(self, tensor: Tensor) -> TensorPlace | None:
        """The place of ``tensor``, None where it is no view of the batch as it was."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr())
        if number is None or not tensor.numel():
            return None
        known = self._tensors[number]
        is_view = tensor.dtype is known.dtype and tensor.device == known.device
        if not is_view or tensor._version != self._versions[number] or tensor.requires_grad:
            return None
        return TensorPlace(
            number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )


class CallPlaces(NamedTuple):
    """The arguments of a call as places in a batch."""

    input: TensorPlace
    offsets: TensorPlace | None
    per_sample_weights: TensorPlace | None


def places_of(arguments: CallArguments, known: KnownTensors) -> CallPlaces | None:
    """The places of ``arguments``, None where one is no part of the batch."""
    places = [None if tensor is None else known.place_of(tensor) for tensor in arguments]
    are_known = [p is not None or t is None for p, t in zip(places, arguments, strict=True)]
    of_input, *others = places
    return CallPlaces(of_input, *others) if of_input is not None and all(are_known) else None
