"""Defines the operations on hash tables and picks their kernels."""

import torch

from torchembed import _native
from torchembed.core.dispatch import define_op
from torchembed.core.hash_tables import (
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
from torchembed.ops.hash_table.cuda import (
    find_slots_kernel,
    insert_keys_kernel,
    touch_slots_kernel,
)
from torchembed.ops.hash_table.reference import (
    erase_keys_reference,
    find_slots_reference,
    insert_keys_reference,
    touch_slots_reference,
)

find_slots_op = define_op(
    "find_slots(Tensor keys, Tensor tables, Tensor digests, Tensor slot_keys, Tensor geometry)"
    " -> Tensor",
    reference=find_slots_reference,
    fake=lambda keys, *table: torch.empty_like(keys),
    triton="torchembed.triton_kernels.find_slots:launch_find_slots",
    cuda=find_slots_kernel(),
    native=_native.native_op("find_slots"),
    check=check_find_slots,
    check_contents=check_find_slots_contents,
)
touch_slots_op = define_op(
    "touch_slots(Tensor slots, Tensor tables, int policy, Tensor epoch, Tensor? epoch_number,"
    " Tensor? scores_in, Tensor? is_trained, Tensor(a!) touched, Tensor(b!)? scores,"
    " Tensor(c!) counters) -> ()",
    reference=touch_slots_reference,
    fake=lambda touch: None,
    triton="torchembed.triton_kernels.touch_slots:launch_touch_slots",
    cuda=touch_slots_kernel(),
    native=_native.native_op("touch_slots"),
    check=check_touch_slots,
    check_contents=check_touch_slots_contents,
    record=SlotTouch,
)
insert_keys_op = define_op(
    "insert_keys(Tensor keys, Tensor tables, Tensor slots, Tensor? wanted, int policy,"
    " Tensor epoch, Tensor? epoch_number, Tensor released, Tensor? scores_in, Tensor? is_trained,"
    " Tensor(a!) digests, Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores,"
    " Tensor geometry, Tensor(e!) counters)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=insert_keys_reference,
    fake=lambda insertion: empty_results(insertion.keys),
    triton="torchembed.triton_kernels.insert_keys:launch_insert_keys",
    cuda=insert_keys_kernel(),
    native=_native.native_op("insert_keys"),
    check=check_insert_keys,
    check_contents=check_insert_keys_contents,
    record=KeyInsertion,
)
erase_keys_op = define_op(
    "erase_keys(Tensor keys, Tensor tables, Tensor released, Tensor(a!) digests,"
    " Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores, Tensor geometry,"
    " Tensor(e!) counters) -> Tensor",
    reference=erase_keys_reference,
    fake=lambda erasure: torch.empty_like(erasure.keys),
    triton="torchembed.triton_kernels.erase_keys:launch_erase_keys",
    native=_native.native_op("erase_keys"),
    check=check_erase_keys,
    check_contents=check_erase_keys_contents,
    record=KeyErasure,
)
