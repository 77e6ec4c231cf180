"""Arguments of the operations on caches of rows for calls without their public functions: some that
fit, and what is said to others."""

from typing import Any

import torch

from torchembed.ops.row_cache import empty_row_cache

LONG, INT = torch.int64, torch.int32
ROWS = torch.tensor([3, -1, 3])
ONE, TWO = torch.tensor([1]), torch.tensor([2])
CACHE = empty_row_cache(4, 2)._asdict()
MOVES = {
    "slots": torch.tensor([1, -1], dtype=INT),
    "written_rows": torch.tensor([2, -1]),
    "read_rows": torch.tensor([3, -1]),
    "count": ONE,
}

FITTING: dict[str, dict[str, Any]] = {
    "claim_slots": {
        "unique_rows": torch.tensor([1, 3, -1]),
        "num_unique": TWO.int(),
        "epoch": TWO,
        "released": ONE,
        "is_trained": None,
        **CACHE,
    },
    "exchange_places": {**MOVES, "place_of_row": torch.arange(4, dtype=INT)},
    "move_rows": {
        **MOVES,
        "cached": [torch.ones(2, 3), torch.ones(2)],
        "stored": [torch.ones(4, 3), torch.ones(4)],
    },
    "find_cached": {
        "slot_of_row": CACHE["slot_of_row"],
        "rows": ROWS,
        "num_rows": None,
        "no_slot": -1,
    },
    "read_rows": {
        "cached": torch.ones(2, 3),
        "stored": torch.ones(4, 3),
        "slots": torch.tensor([1, -1, -1]),
        "rows": ROWS,
    },
}

Case = tuple[type[Exception], str, dict[str, Any]]

NOT_THERE = torch.zeros(2, dtype=LONG, device="meta")
SPREAD = torch.zeros(1, dtype=LONG).expand(3)

ERRORS: dict[str, list[Case]] = {
    "claim_slots": [
        (TypeError, r"^unique_rows must be int32 or int64, got", {"unique_rows": ROWS.short()}),
        (ValueError, r"^unique_rows must be contiguous; call", {"unique_rows": SPREAD}),
        (ValueError, r"^unique_rows must have 1 dim", {"unique_rows": ROWS[None]}),
        (TypeError, r"^num_unique must be int32, got int64; take it from", {"num_unique": ONE}),
        (TypeError, r"^epoch must be int64, got int32; call \.long\(\)$", {"epoch": TWO.int()}),
        (
            ValueError,
            r"^released must have shape \(1,\) \(a scalar in a tensor\), got \(3,\)$",
            {"released": ROWS},
        ),
        (TypeError, r"^is_trained must be bool, got int64; call \.b", {"is_trained": ONE}),
        (
            TypeError,
            r"^slot_of_row must be int32, got int64; make the cache by empty_row_cache$",
            {"slot_of_row": ROWS},
        ),
        (
            ValueError,
            r"^row_of_slot must hold at least one slot and fewer than 2\*\*31, got 0; make the",
            {"row_of_slot": ROWS[:0]},
        ),
        (
            ValueError,
            r"^last_use must have shape \(2,\) \(one for each slot\), got \(3,\)$",
            {"last_use": ROWS},
        ),
        (TypeError, r"^is_recent must be bool, got int64; make the", {"is_recent": ROWS}),
        (TypeError, r"^is_dirty must be bool, got int64; make the", {"is_dirty": ROWS}),
        (ValueError, r"^hand must have shape \(1,\) \(a slot\), got", {"hand": ROWS}),
        (ValueError, r"^counters must have shape \(5,\) \(one for each", {"counters": ROWS}),
        (
            ValueError,
            r"^last_use must be on cpu as unique_rows is, got meta",
            {"last_use": NOT_THERE},
        ),
    ],
    "exchange_places": [
        (TypeError, r"^place_of_row must be int32, got int64; call", {"place_of_row": ROWS}),
        (
            ValueError,
            r"^place_of_row must be contiguous; call",
            {"place_of_row": torch.zeros(1, dtype=INT).expand(4)},
        ),
        (TypeError, r"^slots must be int32, got int64; take the moves from", {"slots": ROWS}),
        (
            ValueError,
            r"^read_rows must have shape \(2,\) \(one for each move\), got \(3,\)$",
            {"read_rows": ROWS},
        ),
        (TypeError, r"^written_rows must be int64, got int32", {"written_rows": ROWS.int()}),
        (ValueError, r"^count must have shape \(1,\) \(the number of moves\)", {"count": ROWS}),
        (
            ValueError,
            r"^place_of_row must be on cpu as slots is, got meta",
            {"place_of_row": NOT_THERE.int()},
        ),
    ],
    "move_rows": [
        (
            ValueError,
            r"^cached and stored must hold as many tensors, at least one, got 2 and 0$",
            {"stored": []},
        ),
        (ValueError, r"at least one, got 0 and 0$", {"stored": [], "cached": []}),
        (TypeError, r"^slots must be int32, got int64; take the moves from", {"slots": ROWS}),
        (
            ValueError,
            r"^read_rows must have shape \(2,\) \(one for each move\), got \(3,\)$",
            {"read_rows": ROWS},
        ),
        (TypeError, r"^written_rows must be int64, got int32", {"written_rows": ROWS.int()}),
        (ValueError, r"^count must have shape \(1,\) \(the number of moves\)", {"count": ROWS}),
        (
            ValueError,
            r"^cached\[1\] must have 2 rows as cached\[0\] has, got shape \(4,\)$",
            {"cached": [torch.ones(2, 3), torch.ones(4)]},
        ),
        (
            ValueError,
            r"^stored\[1\] must have 4 rows as stored\[0\] has, got shape \(\)$",
            {"stored": [torch.ones(4, 3), torch.ones(())]},
        ),
        (
            ValueError,
            r"^stored\[0\] must have at least one dimension, got a scalar$",
            {"stored": [torch.ones(()), torch.ones(4)]},
        ),
        (
            TypeError,
            r"^stored\[1\] must be float32 as cached\[1\] is, got float16; cast one of them$",
            {"stored": [torch.ones(4, 3), torch.ones(4).half()]},
        ),
        (
            ValueError,
            r"^stored\[0\] must have rows of shape \(3,\) as cached\[0\] has, got \(2,\)$",
            {"stored": [torch.ones(4, 2), torch.ones(4)]},
        ),
        (
            ValueError,
            r"^cached\[0\] must be contiguous; call \.contiguous\(\)$",
            {"cached": [torch.ones(2, 1).expand(2, 3), torch.ones(2)]},
        ),
        (
            ValueError,
            (
                r"^stored\[0\] must have contiguous rows that do not overlap, got shape \(4, 3\) "
                r"and strides \(0, .\); call \.contiguous\(\)$"
            ),
            {"stored": [torch.ones(1, 3).expand(4, 3), torch.ones(4)]},
        ),
        (
            ValueError,
            r"^cached\[1\] must be on cpu as cached\[0\] is, got meta",
            {"cached": [torch.ones(2, 3), torch.ones(2, device="meta")]},
        ),
        (
            ValueError,
            r"^stored\[0\] must be on the device of cached\[0\], .*, or in pinned .*, got meta$",
            {"stored": [torch.ones(4, 3, device="meta"), torch.ones(4)]},
        ),
    ],
    "find_cached": [
        (TypeError, r"^rows must be int32 or int64, got float32", {"rows": torch.ones(3)}),
        (ValueError, r"^rows must be contiguous", {"rows": SPREAD}),
        (ValueError, r"^rows must have 1 dim", {"rows": ROWS[None]}),
        (TypeError, r"^slot_of_row must be int32, got int64; make the", {"slot_of_row": ROWS}),
        (
            ValueError,
            r"^slot_of_row must be on cpu as rows is, got meta",
            {"slot_of_row": NOT_THERE.int()},
        ),
        (TypeError, r"^num_rows must be int32, got int64; take them from", {"num_rows": ONE}),
        (
            ValueError,
            r"^num_rows must have shape \(1,\) \(a scalar in a tensor\), got \(3,\)$",
            {"num_rows": ROWS.int()},
        ),
        (
            ValueError,
            r"^no_slot must fit int32 as rows are, got 2147483648$",
            {"rows": ROWS.int(), "no_slot": 2**31},
        ),
    ],
    "read_rows": [
        (TypeError, r"^cached must be float32 or float16 or bfloat16, got", {"cached": ROWS}),
        (TypeError, r"^stored must be float32 or float16 or bfloat16, got", {"stored": ROWS}),
        (
            TypeError,
            r"^stored must be float32 as cached is, got float16; cast one of them$",
            {"stored": torch.ones(4, 3).half()},
        ),
        (ValueError, r"^stored must have 2 dim", {"stored": torch.ones(4)}),
        (
            ValueError,
            r"^stored must have 3 columns as cached has, got 2$",
            {"stored": torch.ones(4, 2)},
        ),
        (
            ValueError,
            (
                r"^stored must have contiguous rows that do not overlap, got shape \(4, 3\) and "
                r"strides \(1, 0\); call \.contiguous\(\)$"
            ),
            {"stored": torch.ones(4, 1).expand(4, 3)},
        ),
        (ValueError, r"^rows must be contiguous", {"rows": SPREAD}),
        (
            ValueError,
            r"^slots must have shape \(3,\) \(one for each row\), got \(1,\)$",
            {"slots": ONE},
        ),
        (TypeError, r"^slots must be int32 or int64, got float32", {"slots": torch.ones(3)}),
        (
            ValueError,
            r"^cached must be on cpu as rows is, got meta",
            {"cached": torch.ones(2, 3, device="meta")},
        ),
        (
            ValueError,
            r"^stored must be on the device of rows, .*, or in pinned .* for a GPU, got meta$",
            {"stored": torch.ones(4, 3, device="meta")},
        ),
    ],
}

CONTENTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "claim_slots": [
        (
            "num_unique must lie in [0, 4), got 4 at position 0; take them from find_runs",
            {"num_unique": torch.tensor([4], dtype=INT)},
        ),
        (
            "unique_rows must lie in [0, 4), got 4 at position 1",
            {"unique_rows": torch.tensor([0, 4, -1])},
        ),
        (
            "unique_rows must increase, got 3 after 3 at position 1",
            {"unique_rows": torch.tensor([3, 3, -1])},
        ),
        (
            "slot_of_row must lie in [-1, 2), got 2 at position 3",
            {"slot_of_row": torch.tensor([0, 1, -1, 2], dtype=INT)},
        ),
        (
            "row_of_slot must lie in [-1, 4), got -2 at position 0",
            {"row_of_slot": torch.tensor([-2, 1])},
        ),
        ("hand must lie in [0, 2), got 2 at position 0; make the cache by", {"hand": TWO}),
        ("released must be less than epoch, 2, since this batch is not", {"released": TWO}),
    ],
    "exchange_places": [
        ("count must lie in [0, 3), got 3 at position 0", {"count": torch.tensor([3])}),
        (
            "written_rows must lie in [-1, 4), got 4 at position 0",
            {"written_rows": torch.tensor([4, -1])},
        ),
        (
            "read_rows must lie in [0, 4), got -1 at position 0",
            {"read_rows": torch.tensor([-1, -1])},
        ),
        (
            "place_of_row must lie in [0, 4), got 4 at position 2; give each row a place",
            {"place_of_row": torch.tensor([0, 1, 4, 2], dtype=INT)},
        ),
    ],
    "move_rows": [
        ("count must lie in [0, 3), got 3 at position 0", {"count": torch.tensor([3])}),
        (
            "slots must lie in [0, 2), got 2 at position 0",
            {"slots": torch.tensor([2, -1], dtype=INT)},
        ),
        (
            "written_rows must lie in [-1, 4), got 4 at position 0",
            {"written_rows": torch.tensor([4, -1])},
        ),
        (
            "read_rows must lie in [-1, 4), got -2 at position 1",
            {
                "read_rows": torch.tensor([3, -2]),
                "slots": torch.tensor([1, 0], dtype=INT),
                "count": TWO,
            },
        ),
    ],
    "find_cached": [
        ("rows must lie in [-1, 4), got 4 at position 0", {"rows": torch.tensor([4, 0, 1])}),
        (
            "num_rows must lie in [0, 4), got 4 at position 0; take them from find_runs",
            {"num_rows": torch.tensor([4], dtype=INT)},
        ),
    ],
    "read_rows": [
        ("slots must lie in [-1, 2), got 2 at position 1", {"slots": torch.tensor([1, 2, 0])}),
        ("rows must lie in [-1, 4), got 4 at position 0", {"rows": torch.tensor([4, 0, 1])}),
    ],
}
