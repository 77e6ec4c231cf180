"""The agreement of ranks on which calls of modules that they share become one lookup."""

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

import torch

from torchembed.core import ranks
from torchembed.modules.calls_ahead import CallKind, CallSlot, ModuleOfOneTable
from torchembed.modules.sharded.joined_exchange import ExchangeKind, ExchangeSlot


class _Call(Protocol):
    """An observed call."""

    @property
    def module(self) -> ModuleOfOneTable: ...
    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]: ...
    @property
    def kind(self) -> CallKind: ...
    @property
    def slot(self) -> CallSlot: ...

    def _replace(self, *, kind: CallKind, slot: CallSlot) -> "_Call": ...


C = TypeVar("C", bound=_Call)


def agreed_calls(calls: Sequence[C], modules: Sequence[ModuleOfOneTable]) -> list[C]:
    """``calls`` with the sizes of all ranks in the kinds and slots of those that are exchanged.

    Collective where one of the model's ``modules`` is on several ranks. Where ranks have called
    these in different ways, whose ids and gradients cannot be one exchange, their calls are left
    out.
    """
    numbers = {id(m): number for number, m in enumerate(modules) if m.is_on_several_ranks}
    if not numbers:
        return list(calls)
    shared = [call for call in calls if id(call.module) in numbers]
    forms = [(numbers[id(call.module)], *_form(call)) for call in shared]
    sizes = [_size(call) for call in shared]
    of_ranks = ranks.gather_objects((forms, sizes))
    found = [call for call in calls if id(call.module) not in numbers]
    if any(of_rank != forms for of_rank, _ in of_ranks):
        return found
    for call, *of_call in zip(shared, *(of_rank for _, of_rank in of_ranks), strict=True):
        kind, slot = call.kind, call.slot
        if isinstance(kind, ExchangeKind) and isinstance(slot, ExchangeSlot):
            num_bags, num_ids = zip(*of_call, strict=True)
            kind, slot = kind._replace(num_bags=num_bags), slot._replace(most_ids=max(num_ids))
        found.append(call._replace(kind=kind, slot=slot))
    return found


def _form(call: _Call) -> tuple[Hashable, ...]:
    """The form of ``call``, which all ranks must have alike for it to be in a joined lookup."""
    slot, dtypes = call.slot, tuple(map(str, call.dtypes))
    hotness = slot.hotness if isinstance(slot, ExchangeSlot) else None
    return hotness, call.kind.is_jagged, dtypes


def _size(call: _Call) -> tuple[int, int]:
    """The number of bags of an exchange on this rank, and of ids."""
    num_bags = call.kind.num_own_bags if isinstance(call.kind, ExchangeKind) else 0
    return num_bags, call.slot.num_ids
