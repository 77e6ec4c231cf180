"""Calls of modules of one table that are noted, or answered by what was looked up before them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchembed.core.stand_ins import is_stand_in
from torchembed.modules.table_module import TableModule


class CallArguments(NamedTuple):
    """The arguments of ``EmbeddingBag.forward``, or of ``Embedding.forward``."""

    input: Tensor
    offsets: Tensor | None = None
    per_sample_weights: Tensor | None = None
    count: Tensor | None = None
    """int64 ``[1]``: the number of ids, where spare ones are behind them; None where all count."""


class CallHandler(Protocol):
    """Sees each call of the modules that it was given to, as their ``calls_ahead``."""

    def __call__(self, module: "ModuleOfOneTable", arguments: CallArguments, /) -> Tensor | None:
        """The vectors that were looked up for the call; None where the module is to look it up."""
        ...


class CallSlot(Protocol):
    """One call of a module as a part of a joined lookup."""

    @property
    def num_ids(self) -> int: ...


class CallKind(Protocol):
    """The properties that calls must share to be looked up in one; can be hashed."""

    @property
    def is_jagged(self) -> bool:
        """True for bags between offsets."""
        ...

    def joined_lookup(self, slots: Sequence[Any], /) -> Any:
        """The lookup of several calls of this kind, with the stages of a
        :class:`~torchembed.modules.lookup.joined_lookup.JoinedLookup`."""
        ...


class ModuleOfOneTable(TableModule):
    """A module of one table under the parameter ``weight``, whose calls can be joined."""

    calls_ahead: CallHandler | None = None
    """Sees each call before it is looked up, and may answer it; set by captured steps."""

    @property
    def is_on_several_ranks(self) -> bool:
        """True where ranks exchange ids, vectors or gradients of the table."""
        raise NotImplementedError

    def joined_slot(self, arguments: CallArguments) -> tuple[CallKind, CallSlot] | None:
        """A call of ``forward`` with ``arguments`` as part of a joined lookup; None where it cannot
        be one."""
        raise NotImplementedError

    def current_kind(self, kind: Any) -> CallKind:
        """A ``kind`` that :meth:`joined_slot` gave, for the groups that are updated together
        now."""
        raise NotImplementedError

    def is_current(self, kind: Any) -> bool:
        """True where a call of ``kind``, which :meth:`current_kind` gave, is one still."""
        raise NotImplementedError

    def _answered(self, arguments: CallArguments) -> Tensor | None:
        """The vectors that :attr:`calls_ahead` has for a call of ``forward``, if any."""
        handler = self.calls_ahead
        if handler is None or torch.compiler.is_compiling() or is_stand_in(arguments.input):
            return None
        return handler(self, arguments)


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
    count: TensorPlace | None


def places_of(arguments: CallArguments, known: KnownTensors) -> CallPlaces | None:
    """The places of ``arguments``, None where one is no part of the batch."""
    places = [None if tensor is None else known.place_of(tensor) for tensor in arguments]
    are_known = [p is not None or t is None for p, t in zip(places, arguments, strict=True)]
    of_input, *others = places
    return CallPlaces(of_input, *others) if of_input is not None and all(are_known) else None
