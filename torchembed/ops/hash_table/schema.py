"""Defines the operations on hash tables and picks their kernels."""

import torch
from torch import Tensor

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.core.hash_tables import (
    InsertionResults,
    KeyErasure,
    KeyInsertion,
    SlotTouch,
    empty_results,
)
from torchembed.ops.hash_table.checks import (
    check_erase_keys,
    check_erase_keys_contents,
    check_find_slots,
    check_find_slots_contents,
    check_insert_keys,
    check_insert_keys_contents,
    check_touch_slots,
    check_touch_slots_contents,
)
from torchembed.ops.hash_table.reference import (
    erase_keys_reference,
    find_slots_reference,
    insert_keys_reference,
    touch_slots_reference,
)


def _fake_find(
    keys: Tensor, tables: Tensor, digests: Tensor, slot_keys: Tensor, geometry: Tensor
) -> Tensor:
    return torch.empty_like(keys)


find_slots_op = define_op(
    "find_slots(Tensor keys, Tensor tables, Tensor digests, Tensor slot_keys, Tensor geometry)"
    " -> Tensor",
    reference=find_slots_reference,
    fake=_fake_find,
    triton="torchembed.triton_kernels.find_slots:launch_find_slots",
    native=_native.native_op("find_slots"),
    native_missing=_native.missing_reason(),
    check=check_find_slots,
    check_contents=check_find_slots_contents,
)


def _fake_touch(touch: SlotTouch) -> None:
    return None


touch_slots_op = define_op(
    "touch_slots(Tensor slots, Tensor tables, int policy, Tensor epoch, Tensor? epoch_number,"
    " Tensor? scores_in, Tensor? is_trained, Tensor(a!) touched, Tensor(b!)? scores,"
    " Tensor(c!) counters) -> ()",
    reference=touch_slots_reference,
    fake=_fake_touch,
    triton="torchembed.triton_kernels.touch_slots:launch_touch_slots",
    native=_native.native_op("touch_slots"),
    native_missing=_native.missing_reason(),
    check=check_touch_slots,
    check_contents=check_touch_slots_contents,
    record=SlotTouch,
)


def _fake_insert(insertion: KeyInsertion) -> InsertionResults:
    return empty_results(insertion.keys)


insert_keys_op = define_op(
    "insert_keys(Tensor keys, Tensor tables, Tensor slots, Tensor? wanted, int policy,"
    " Tensor epoch, Tensor? epoch_number, Tensor released, Tensor? scores_in, Tensor? is_trained,"
    " Tensor(a!) digests, Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores,"
    " Tensor geometry, Tensor(e!) counters)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=insert_keys_reference,
    fake=_fake_insert,
    triton="torchembed.triton_kernels.insert_keys:launch_insert_keys",
    native=_native.native_op("insert_keys"),
    native_missing=_native.missing_reason(),
    check=check_insert_keys,
    check_contents=check_insert_keys_contents,
    record=KeyInsertion,
)


def _fake_erase(erasure: KeyErasure) -> Tensor:
    return torch.empty_like(erasure.keys)


erase_keys_op = define_op(
    "erase_keys(Tensor keys, Tensor tables, Tensor released, Tensor(a!) digests,"
    " Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores, Tensor geometry,"
    " Tensor(e!) counters) -> Tensor",
    reference=erase_keys_reference,
    fake=_fake_erase,
    triton="torchembed.triton_kernels.erase_keys:launch_erase_keys",
    native=_native.native_op("erase_keys"),
    native_missing=_native.missing_reason(),
    check=check_erase_keys,
    check_contents=check_erase_keys_contents,
    record=KeyErasure,
)
