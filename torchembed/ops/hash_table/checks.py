"""Requirements of the operations on hash tables on their arguments."""

import torch
from torch import Tensor

from torchembed.core import checks, contents
from torchembed.core.hash_tables import (
    BUCKET_SLOTS,
    Counter,
    KeyErasure,
    KeyInsertion,
    Policy,
    SlotTouch,
)

_INT64 = (torch.int64,)
_POLICIES = frozenset(map(int, Policy))
_MAX_IDS = 2**31


def _check_vector(name: str, tensor: Tensor, dtype: torch.dtype, advice: str) -> None:
    checks.check_dtype(name, tensor, (dtype,), advice)
    checks.check_dim(name, tensor, 1)
    checks.check_contiguous(name, tensor)


def _check_ids(name: str, tensor: Tensor, keys_name: str, keys: Tensor, dtype: torch.dtype) -> None:
    """Checks a tensor with one element for each id of a batch."""
    advice = "call .int()" if dtype == torch.int32 else "call .long()"
    _check_vector(name, tensor, dtype, "call .bool()" if dtype == torch.bool else advice)
    checks.check_numel(name, tensor, keys.numel(), f"as {keys_name} has")
    checks.check_same_device(keys_name, keys, **{name: tensor})


def _check_batch(keys_name: str, keys: Tensor, tables: Tensor) -> None:
    _check_vector(keys_name, keys, torch.int64, "call .long()")
    if checks.reaches(keys.numel(), _MAX_IDS):
        raise ValueError(
            f"{keys_name} must hold fewer than 2**31 ids, got {keys.numel()}; split the batch"
        )
    _check_ids("tables", tables, keys_name, keys, torch.int32)


def _check_state(
    like_name: str,
    like: Tensor,
    num_slots: int,
    **state: Tensor | None,
) -> None:
    for name, tensor in state.items():
        if tensor is not None:
            advice = "make the tables by empty_hash_tables"
            dtype = torch.uint8 if name == "digests" else torch.int64
            _check_vector(name, tensor, dtype, advice)
            checks.check_numel(name, tensor, num_slots, "one for each slot")
            checks.check_same_device(like_name, like, **{name: tensor})


def _check_of_tables(
    name: str, tensor: Tensor, num_columns: int, like_name: str, like: Tensor
) -> None:
    checks.check_dtype(name, tensor, _INT64, "make the tables by empty_hash_tables")
    checks.check_dim(name, tensor, 2)
    if tensor.shape[1] != num_columns:
        raise ValueError(f"{name} must have {num_columns} columns, got {tensor.shape[1]}")
    checks.check_contiguous(name, tensor)
    checks.check_same_device(like_name, like, **{name: tensor})


def _check_all_state(changed: KeyInsertion | KeyErasure) -> None:
    keys, geometry, counters = changed.keys, changed.geometry, changed.counters
    _check_state(
        "keys",
        keys,
        changed.digests.numel(),
        digests=changed.digests,
        slot_keys=changed.slot_keys,
        touched=changed.touched,
        scores=changed.scores,
    )
    _check_of_tables("geometry", geometry, 4, "keys", keys)
    _check_of_tables("counters", counters, len(Counter), "keys", keys)
    if counters.shape[0] != geometry.shape[0]:
        raise ValueError(
            f"counters must have {geometry.shape[0]} rows, one for each table of geometry, "
            f"got {counters.shape[0]}"
        )


def _check_flags(
    like_name: str, like: Tensor, is_trained: Tensor | None, **epochs: Tensor | None
) -> None:
    scalars = {name: (tensor, torch.int64) for name, tensor in epochs.items()}
    for name, (tensor, dtype) in {**scalars, "is_trained": (is_trained, torch.bool)}.items():
        if tensor is not None:
            advice = "call .long()" if dtype == torch.int64 else "call .bool()"
            checks.check_dtype(name, tensor, (dtype,), advice)
            checks.check_numel(name, tensor, 1, "a scalar in a tensor")
            checks.check_same_device(like_name, like, **{name: tensor})


def _check_policy(
    policy: int,
    epoch_number: Tensor | None,
    scores_in: Tensor | None,
    scores: Tensor | None,
) -> None:
    if policy not in _POLICIES:
        raise ValueError(f"policy must be a value of Policy, got {policy}")
    name = Policy(policy).name
    for argument, given, needed in (
        ("scores", scores, policy != Policy.LRU),
        ("epoch_number", epoch_number, policy == Policy.EPOCH_LFU),
        ("scores_in", scores_in, policy == Policy.CALLER),
    ):
        if needed and given is None:
            raise ValueError(f"{argument} must be given under {name}, got None")
        if not needed and given is not None:
            raise ValueError(f"{argument} must be None under {name}, got a tensor")


def check_find_slots(
    keys: Tensor, tables: Tensor, digests: Tensor, slot_keys: Tensor, geometry: Tensor
) -> None:
    _check_batch("keys", keys, tables)
    _check_state("keys", keys, digests.numel(), digests=digests, slot_keys=slot_keys)
    _check_of_tables("geometry", geometry, 4, "keys", keys)


def check_touch_slots(touch: SlotTouch) -> None:
    _check_batch("slots", touch.slots, touch.tables)
    _check_policy(touch.policy, touch.epoch_number, touch.scores_in, touch.scores)
    if touch.scores_in is not None:
        _check_ids("scores_in", touch.scores_in, "slots", touch.slots, torch.int64)
    _check_flags(
        "slots", touch.slots, touch.is_trained, epoch=touch.epoch, epoch_number=touch.epoch_number
    )
    _check_state(
        "slots", touch.slots, touch.touched.numel(), touched=touch.touched, scores=touch.scores
    )
    _check_of_tables("counters", touch.counters, len(Counter), "slots", touch.slots)


def check_insert_keys(insertion: KeyInsertion) -> None:
    _check_batch("keys", insertion.keys, insertion.tables)
    _check_ids("slots", insertion.slots, "keys", insertion.keys, torch.int64)
    if insertion.wanted is not None:
        _check_ids("wanted", insertion.wanted, "keys", insertion.keys, torch.bool)
    _check_policy(insertion.policy, insertion.epoch_number, insertion.scores_in, insertion.scores)
    if insertion.scores_in is not None:
        _check_ids("scores_in", insertion.scores_in, "keys", insertion.keys, torch.int64)
    epochs = {
        "epoch": insertion.epoch,
        "epoch_number": insertion.epoch_number,
        "released": insertion.released,
    }
    _check_flags("keys", insertion.keys, insertion.is_trained, **epochs)
    _check_all_state(insertion)


def check_erase_keys(erasure: KeyErasure) -> None:
    _check_batch("keys", erasure.keys, erasure.tables)
    _check_flags("keys", erasure.keys, None, released=erasure.released)
    _check_all_state(erasure)


def _check_tables_contents(tables: Tensor, num_tables: int) -> None:
    advice = "tables are numbered within the group, -1 is no id"
    contents.check_in_range("tables", tables, -1, num_tables, advice)


def _check_geometry_contents(geometry: Tensor, num_slots: int) -> None:
    advice = "make it by geometry_of"
    contents.check_in_range("geometry", geometry.flatten(), 0, num_slots + 1, advice)
    contents.check_in_range("slots a bucket", geometry[:, 3], 0, BUCKET_SLOTS + 1, advice)
    ends = geometry[:, 0] + geometry[:, 1] * geometry[:, 2] * geometry[:, 3]
    contents.check_in_range("the slots of tables", ends, 0, num_slots + 1, advice)


def _check_slots_contents(slots: Tensor, num_slots: int) -> None:
    contents.check_in_range("slots", slots, -1, num_slots, "take them from find_slots")


def check_find_slots_contents(
    keys: Tensor, tables: Tensor, digests: Tensor, slot_keys: Tensor, geometry: Tensor
) -> None:
    _check_tables_contents(tables, geometry.shape[0])
    _check_geometry_contents(geometry, digests.numel())


def check_touch_slots_contents(touch: SlotTouch) -> None:
    _check_tables_contents(touch.tables, touch.counters.shape[0])
    _check_slots_contents(touch.slots, touch.touched.numel())


def check_insert_keys_contents(insertion: KeyInsertion) -> None:
    _check_tables_contents(insertion.tables, insertion.geometry.shape[0])
    _check_slots_contents(insertion.slots, insertion.digests.numel())
    _check_geometry_contents(insertion.geometry, insertion.digests.numel())
    if int(insertion.released) >= int(insertion.epoch):
        raise ValueError(
            f"released must be less than epoch, {int(insertion.epoch)}, since this batch is not "
            f"trained yet, got {int(insertion.released)}"
        )


def check_erase_keys_contents(erasure: KeyErasure) -> None:
    check_find_slots_contents(
        erasure.keys, erasure.tables, erasure.digests, erasure.slot_keys, erasure.geometry
    )
