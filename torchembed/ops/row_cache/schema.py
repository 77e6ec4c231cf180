"""Defines the operations on caches of rows and picks their kernels."""

import torch

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.core.row_caches import PlaceExchange, RowMove, SlotClaim, empty_claim
from torchembed.ops.row_cache.checks import (
    check_claim_slots,
    check_claim_slots_contents,
    check_exchange_places,
    check_exchange_places_contents,
    check_find_cached,
    check_find_cached_contents,
    check_move_rows,
    check_move_rows_contents,
    check_read_rows,
    check_read_rows_contents,
)
from torchembed.ops.row_cache.reference import (
    claim_slots_reference,
    exchange_places_reference,
    find_cached_reference,
    move_rows_reference,
    read_rows_reference,
)

claim_slots_op = define_op(
    "claim_slots(Tensor unique_rows, Tensor num_unique, Tensor epoch, Tensor released,"
    " Tensor? is_trained, Tensor(a!) slot_of_row, Tensor(b!) row_of_slot, Tensor(c!) last_use,"
    " Tensor(d!) is_recent, Tensor(e!) is_dirty, Tensor(f!) hand, Tensor(g!) counters)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=claim_slots_reference,
    fake=lambda claim: empty_claim(claim.unique_rows, claim.row_of_slot.shape[0]),
    triton="torchembed.triton_kernels.claim_slots:launch_claim_slots",
    native=_native.native_op("claim_slots"),
    check=check_claim_slots,
    check_contents=check_claim_slots_contents,
    record=SlotClaim,
)
exchange_places_op = define_op(
    "exchange_places(Tensor slots, Tensor written_rows, Tensor read_rows, Tensor count,"
    " Tensor(a!) place_of_row) -> (Tensor, Tensor, Tensor)",
    reference=exchange_places_reference,
    fake=lambda exchange: tuple(map(torch.empty_like, exchange[:3])),
    triton="torchembed.triton_kernels.exchange_places:launch_exchange_places",
    native=_native.native_op("exchange_places"),
    check=check_exchange_places,
    check_contents=check_exchange_places_contents,
    record=PlaceExchange,
)
move_rows_op = define_op(
    "move_rows(Tensor slots, Tensor written_rows, Tensor read_rows, Tensor count,"
    " Tensor(a!)[] cached, Tensor(b!)[] stored) -> ()",
    reference=move_rows_reference,
    fake=lambda move: None,
    triton="torchembed.triton_kernels.move_rows:launch_move_rows",
    native=_native.native_op("move_rows"),
    check=check_move_rows,
    check_contents=check_move_rows_contents,
    record=RowMove,
)
find_cached_op = define_op(
    "find_cached(Tensor slot_of_row, Tensor rows, Tensor? num_rows, int no_slot) -> Tensor",
    reference=find_cached_reference,
    fake=lambda slot_of_row, rows, num_rows, no_slot: torch.empty_like(rows),
    triton="torchembed.triton_kernels.find_cached:launch_find_cached",
    native=_native.native_op("find_cached"),
    check=check_find_cached,
    check_contents=check_find_cached_contents,
)
read_rows_op = define_op(
    "read_rows(Tensor cached, Tensor stored, Tensor slots, Tensor rows) -> Tensor",
    reference=read_rows_reference,
    fake=lambda cached, stored, slots, rows: cached.new_empty(rows.shape[0], cached.shape[1]),
    triton="torchembed.triton_kernels.move_rows:launch_read_rows",
    native=_native.native_op("read_rows"),
    check=check_read_rows,
    check_contents=check_read_rows_contents,
)
