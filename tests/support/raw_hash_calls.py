"""Arguments of the operations on hash tables for calls without their public functions: some that
fit, and what is said to others."""

from typing import Any

import torch

from torchembed.ops.hash_table import Counter, Policy, TableShape, geometry_of

LONG, INT = torch.int64, torch.int32
SLOTS = 8
KEYS = torch.tensor([3, -1, 3])
BATCH = {"keys": KEYS, "tables": torch.zeros(3, dtype=INT)}
HELD = {
    "digests": torch.zeros(SLOTS, dtype=torch.uint8),
    "slot_keys": torch.zeros(SLOTS, dtype=LONG),
    "geometry": geometry_of([TableShape(1, 2, 4)]),
}
USES = {
    "touched": torch.zeros(SLOTS, dtype=LONG),
    "scores": None,
    "counters": torch.zeros(1, len(Counter), dtype=LONG),
}
ONE, TWO = torch.tensor([1]), torch.tensor([2])
SCORING = {
    "policy": int(Policy.LRU),
    "epoch": TWO,
    "epoch_number": None,
    "scores_in": None,
    "is_trained": None,
}
NO_SLOTS = torch.full((3,), -1)

FITTING: dict[str, dict[str, Any]] = {
    "find_slots": {**BATCH, **HELD},
    "touch_slots": {"slots": NO_SLOTS, "tables": BATCH["tables"], **SCORING, **USES},
    "insert_keys": {
        **BATCH,
        "slots": NO_SLOTS,
        "wanted": None,
        **SCORING,
        "released": ONE,
        **HELD,
        **USES,
    },
    "erase_keys": {**BATCH, "released": ONE, **HELD, **USES},
}

Case = tuple[type[Exception], str, dict[str, Any]]

NOT_THERE = torch.zeros(3, dtype=LONG, device="meta")
SPREAD = torch.zeros(1, dtype=LONG).expand(3)

BY_CALLER = {"policy": int(Policy.CALLER), "scores": USES["touched"]}
OF_BATCHES: list[Case] = [
    (
        ValueError,
        r"^tables must hold 3 elements \(as keys has\), got 2$",
        {"tables": KEYS[:2].int()},
    ),
    (TypeError, r"^tables must be int32, got int64; call \.int\(\)$", {"tables": KEYS}),
    (TypeError, r"^keys must be int64, got int32; call \.long\(\)$", {"keys": KEYS.int()}),
    (ValueError, r"^keys must be contiguous; call \.contiguous\(\)$", {"keys": SPREAD}),
    (ValueError, r"^keys must have 1 dim", {"keys": KEYS[None]}),
    (TypeError, r"^digests must be uint8, got int64; make the tables by", {"digests": KEYS}),
    (
        ValueError,
        r"^slot_keys must hold 8 elements \(one for each slot\), got 3$",
        {"slot_keys": KEYS},
    ),
    (
        ValueError,
        r"^geometry must have 4 columns, got 3$",
        {"geometry": torch.zeros(1, 3, dtype=LONG)},
    ),
]
OF_POLICIES: list[Case] = [
    (ValueError, r"^policy must be a value of Policy, got 9$", {"policy": 9}),
    (ValueError, r"^scores must be given under LFU, got None$", {"policy": int(Policy.LFU)}),
    (ValueError, r"^scores must be None under LRU, got a tensor$", {"scores": USES["touched"]}),
    (
        ValueError,
        r"^epoch_number must be given under EPOCH_LFU, got None$",
        {"policy": int(Policy.EPOCH_LFU), "scores": USES["touched"]},
    ),
    (
        ValueError,
        r"^scores_in must be given under CALLER, got None$",
        BY_CALLER,
    ),
    (ValueError, r"^scores_in must be None under LRU, got a tensor$", {"scores_in": KEYS}),
    (ValueError, r"^epoch must hold 1 elements", {"epoch": KEYS}),
    (TypeError, r"^is_trained must be bool, got int64; call \.bool\(\)$", {"is_trained": ONE}),
    (
        ValueError,
        r"^counters must have 11 columns, got 1$",
        {"counters": torch.zeros(1, 1, dtype=LONG)},
    ),
    (
        ValueError,
        r"^counters must be on cpu as .* is, got meta",
        {"counters": USES["counters"].to("meta")},
    ),
]

ERRORS: dict[str, list[Case]] = {
    "find_slots": [
        *OF_BATCHES,
        (ValueError, r"^tables must be on cpu as keys is, got meta", {"tables": NOT_THERE.int()}),
    ],
    "touch_slots": [
        *OF_POLICIES,
        (ValueError, r"^scores must hold 8 elements", {"scores": KEYS, "policy": int(Policy.LFU)}),
        (ValueError, r"^scores_in must hold 3 elem", {"scores_in": ONE, **BY_CALLER}),
    ],
    "insert_keys": [
        *OF_BATCHES,
        *OF_POLICIES,
        (ValueError, r"^slots must hold 3 elements \(as keys has\), got 1$", {"slots": ONE}),
        (TypeError, r"^wanted must be bool, got int64; call \.bool\(\)$", {"wanted": KEYS}),
        (ValueError, r"^released must hold 1 elements", {"released": KEYS}),
        (ValueError, r"^touched must hold 8 elements", {"touched": KEYS}),
        (
            ValueError,
            r"^counters must have 1 rows, one for each table of geometry, got 2$",
            {"counters": torch.zeros(2, len(Counter), dtype=LONG)},
        ),
    ],
    "erase_keys": [
        *OF_BATCHES,
        (ValueError, r"^released must hold 1 elements", {"released": KEYS}),
        (ValueError, r"^scores must hold 8 elements", {"scores": KEYS}),
        (ValueError, r"^counters must have 11 columns", {"counters": KEYS[None]}),
    ],
}

ABROAD = geometry_of([TableShape(1, 2, 5)])
"""A table that does not fit its group's slots."""
CONTENTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "find_slots": [
        ("tables must lie in [-1, 1), got 1 at position 0", {"tables": torch.ones(3, dtype=INT)}),
        ("the slots of tables must lie in [0, 9), got 10 at position 0", {"geometry": ABROAD}),
        (
            "slots a bucket must lie in [0, 129), got 200 at position 0",
            {
                "geometry": geometry_of([TableShape(1, 1, 200)]),
                "digests": torch.zeros(200, dtype=torch.uint8),
                "slot_keys": torch.zeros(200, dtype=LONG),
            },
        ),
    ],
    "touch_slots": [
        ("slots must lie in [-1, 8), got 8 at position 1", {"slots": torch.tensor([0, 8, 1])}),
        (
            "tables must lie in [-1, 1), got -2 at position 0",
            {"tables": torch.full((3,), -2).int()},
        ),
    ],
    "insert_keys": [
        ("slots must lie in [-1, 8), got -3 at position 2", {"slots": torch.tensor([0, 7, -3])}),
        ("the slots of tables must lie in [0, 9), got 10 at position 0", {"geometry": ABROAD}),
        ("released must be less than epoch, 2, since this batch is not", {"released": TWO}),
    ],
    "erase_keys": [
        ("tables must lie in [-1, 1), got 1 at position 0", {"tables": torch.ones(3, dtype=INT)}),
        ("the slots of tables must lie in [0, 9), got 10 at position 0", {"geometry": ABROAD}),
    ],
}
