"""The agreement of ranks on which calls of sharded modules become one exchange."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from torchembed.modules.calls_ahead import CallKind, CallSlot, ModuleOfOneTable
from torchembed.modules.sharded.joined_exchange import ExchangeKind, ExchangeSlot
from torchembed.modules.sharded.sharded_single_table import ShardedSingleTable


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

    Collective where one of the model's ``modules`` is sharded. Where ranks have called these in
    different ways, whose ids cannot be one exchange, calls of sharded modules are left out.
    """
    ranks = [module.ranks for module in modules if isinstance(module, ShardedSingleTable)]
    if not ranks:
        return list(calls)
    numbers = {id(module): number for number, module in enumerate(modules)}
    exchanged: list[tuple[C, ExchangeKind, ExchangeSlot]] = []
    forms, sizes = [], []
    for call in calls:
        kind, slot = call.kind, call.slot
        if isinstance(kind, ExchangeKind) and isinstance(slot, ExchangeSlot):
            exchanged.append((call, kind, slot))
            dtypes = tuple(map(str, call.dtypes))
            forms.append((numbers[id(call.module)], slot.hotness, kind.is_jagged, dtypes))
            sizes.append((kind.num_own_bags, slot.num_ids))
    mine = forms, sizes
    of_ranks = [mine] * dist.get_world_size(ranks[0].group)
    dist.all_gather_object(of_ranks, mine, group=ranks[0].group)
    others = [call for call in calls if not isinstance(call.kind, ExchangeKind)]
    if any(of_rank != forms for of_rank, _ in of_ranks):
        return others
    for (call, kind, slot), *of_call in zip(exchanged, *(s for _, s in of_ranks), strict=True):
        num_bags = tuple(bags for bags, _ in of_call)
        most_ids = max(num_ids for _, num_ids in of_call)
        others.append(
            call._replace(
                kind=kind._replace(num_bags=num_bags), slot=slot._replace(most_ids=most_ids)
            )
        )
    return others
