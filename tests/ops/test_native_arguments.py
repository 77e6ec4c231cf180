"""The C++ library's own operations with arguments of any kind: they refuse or take them, and touch
no memory but their tensors'. What they touch shows under `make sanitize` alone."""

import contextlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.support import lanes, raw_cache_calls, raw_calls, raw_hash_calls
from tests.support.native_library import native, raises_runtime_error
from tests.support.raw_calls import IDS, OFFSETS, SPREAD, WEIGHT
from torchembed import _native
from torchembed.ops.hash_table import TableShape, geometry_of

pytestmark = [
    pytest.mark.skipif(
        _native.load_error() is not None, reason=f"needs the C++ library: {_native.load_error()}"
    ),
    pytest.mark.skipif(lanes.is_interpreted(), reason="Triton's interpreter has the CPU here"),
]

FITTING = raw_calls.FITTING | raw_cache_calls.FITTING | raw_hash_calls.FITTING
NO_IDS = IDS[:0]

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "negative hotness": (
        "pooled_lookup_forward",
        r"hotness must hold counts >= 0, got -1",
        {"hotness": [4, -1], "num_features": 2},
    ),
    "negative hotness in backward": (
        "pooled_lookup_gradient_map",
        r"hotness must hold counts >= 0, got -1",
        {"hotness": [4, -1], "num_features": 2},
    ),
    "negative hotness of gradients": (
        "pooled_lookup_weights_backward",
        r"hotness must hold counts >= 0, got -1",
        {"hotness": [2, -1], "grad": torch.ones(3, 2, 2)},
    ),
    "negative hotness of ids": (
        "linearize_ids",
        r"hotness must hold counts >= 0, got -3",
        {"hotness": [-3]},
    ),
    "hotness that overflows": (
        "pooled_lookup_forward",
        r"the bags must hold 0 ids in all; give as many as sum\(hotness\) \* batch_size",
        {"hotness": [2**62], "batch_size": 4, "rows": NO_IDS},
    ),
    "hotness whose sum overflows": (
        "linearize_ids",
        r"the bags must hold 3 ids in all; give as many as sum\(hotness\) \* batch_size",
        {
            "hotness": [2**63 - 1, 2**63 - 1, 5],
            "batch_size": 1,
            "first_rows": IDS,
            "num_rows": IDS,
        },
    ),
    "too few ids": ("linearize_ids", r"the bags must hold 3 ids in all", {"hotness": [0]}),
    "too many bags": (
        "pooled_lookup_gradient_map",
        r"num_features \* batch_size must be less than 2\*\*31, got 1 \* 1099511627776",
        {"hotness": [0], "batch_size": 2**40, "ids_like": NO_IDS},
    ),
    "bags whose number overflows": (
        "pooled_lookup_forward",
        r"num_features \* batch_size must be less than 2\*\*31",
        {"offsets": IDS[:1], "batch_size": 2**33, "num_features": 2**31},
    ),
    "negative batch size": (
        "pooled_lookup_forward",
        r"batch_size must not be negative, got -3",
        {"batch_size": -3},
    ),
    "negative features": (
        "pooled_lookup_forward",
        r"num_features must not be negative, got -1",
        {"num_features": -1, "offsets": OFFSETS},
    ),
    "what becomes of bad ids": (
        "linearize_ids",
        r"on_bad_id must be 0, 1 or 2, got 7",
        {"on_bad_id": 7},
    ),
    "dtype of rows": (
        "linearize_ids",
        r"rows_dtype must be int32 or int64, got Char",
        {"rows_dtype": torch.int8},
    ),
    "negative rows": ("find_runs", r"num_rows must not be negative, got -1", {"num_rows": -1}),
    "layout": ("sequence_lookup_forward", r"weight must be contiguous", {"weight": SPREAD}),
    "short starts": (
        "rowwise_update",
        r"starts must hold 4 elements, got 3",
        {"starts": FITTING["rowwise_update"]["order"]},
    ),
    "negative number of runs": (
        "rowwise_update",
        r"num_runs must lie in \[0, 4\), got -5 at position 0; take the runs from find_runs",
        {"num_runs": torch.tensor([-5], dtype=torch.int32)},
    ),
    "more runs than ids": (
        "rowwise_update",
        r"num_runs must lie in \[0, 4\), got 4 at position 0; take the runs from find_runs",
        {"num_runs": torch.tensor([4], dtype=torch.int32)},
    ),
    "chunks of other runs": (
        "rowwise_update",
        r"chunk_runs must hold 0 elements, got 1",
        {"chunk_runs": FITTING["rowwise_update"]["num_runs"]},
    ),
    "too few gradients": (
        "rowwise_update",
        r"grad must have 3 rows \(one for each id\), got 2",
        {"grad": WEIGHT[:2]},
    ),
    "a table beyond its group": (
        "find_slots",
        r"table 0 must lie in the group's 8 slots, got geometry 0, 3, 1, 3; make it by geometry_of",
        {"geometry": geometry_of([TableShape(3, 1, 3)])},
    ),
    "tables whose slots overflow": (
        "insert_keys",
        r"table 1 must lie in the group's 8 slots",
        {"geometry": geometry_of([TableShape(1, 2, 4), TableShape(2**31, 2**31, 4)])},
    ),
    "a table before its group": (
        "find_slots",
        r"table 0 must lie in the group's 8 slots, got geometry -9223372036854775808, 1, 1, 4",
        {"geometry": torch.tensor([[-(2**63), 1, 1, 4]])},
    ),
    "too few scores": (
        "touch_slots",
        r"scores must hold 8 elements, got 3",
        {"scores": IDS, "policy": 1},
    ),
    "too few counters": ("insert_keys", r"counters must hold 11 elements", {"counters": IDS}),
    "rows beyond those stored": (
        "claim_slots",
        r"unique_rows must increase within \[0, 4\), got 4 at position 1; take them from find_runs",
        {"unique_rows": torch.tensor([3, 4, -1])},
    ),
    "rows that do not increase": (
        "claim_slots",
        r"unique_rows must increase within \[0, 4\), got 3 at position 1",
        {"unique_rows": torch.tensor([3, 3, -1])},
    ),
    "more distinct rows than ids": (
        "claim_slots",
        r"num_unique must lie in \[0, 4\), got 4; take it from find_runs",
        {"num_unique": torch.tensor([4], dtype=torch.int32)},
    ),
    "a hand beyond the slots": (
        "claim_slots",
        r"hand must lie in \[0, 2\), got 2; make the cache by empty_row_cache",
        {"hand": torch.tensor([2])},
    ),
    "a cache without slots": (
        "claim_slots",
        r"row_of_slot must hold at least one slot and fewer than 2\*\*31, got 0",
        {"row_of_slot": NO_IDS},
    ),
    "more moves than there is room for": (
        "move_rows",
        r"count must lie in \[0, 3\), got 3 at position 0; take the moves from claim_slots",
        {"count": torch.tensor([3])},
    ),
    "more moves of places than there is room for": (
        "exchange_places",
        r"count must lie in \[0, 3\), got 3 at position 0; take the moves from claim_slots",
        {"count": torch.tensor([3])},
    ),
    "a written row without a place": (
        "exchange_places",
        r"written_rows must lie in \[-1, 4\), got 4 at position 0",
        {"written_rows": torch.tensor([4, -1])},
    ),
    "a move that reads no row": (
        "exchange_places",
        r"read_rows must lie in \[0, 4\), got -1 at position 0",
        {"read_rows": torch.tensor([-1, -1])},
    ),
    "a slot beyond the cache": (
        "move_rows",
        r"slots must lie in \[0, 2\), got 2 at position 0",
        {"slots": torch.tensor([2, -1], dtype=torch.int32)},
    ),
    "a row beyond those stored": (
        "move_rows",
        r"read_rows must lie in \[-1, 4\), got 4 at position 0",
        {"read_rows": torch.tensor([4, -1])},
    ),
    "nothing to move": (
        "move_rows",
        r"cached and stored must hold as many tensors, at least one, got 2 and 1",
        {"stored": [WEIGHT]},
    ),
    "tensors of other rows": (
        "move_rows",
        r"cached must have as many rows each, got 4 and 2",
        {"cached": [torch.ones(2, 3), torch.ones(4)]},
    ),
    "rows of other widths": (
        "move_rows",
        r"stored must have rows of 12 bytes as cached has, got 8",
        {"stored": [WEIGHT, torch.ones(4)]},
    ),
    "rows of a scalar": (
        "move_rows",
        r"stored must have at least one dimension, got a scalar",
        {"stored": [torch.ones(()), torch.ones(4)]},
    ),
    "rows that are not contiguous": (
        "move_rows",
        r"stored must have contiguous rows",
        {"stored": [torch.ones(3, 4).T, torch.ones(4)]},
    ),
    "rows that overlap": (
        "move_rows",
        r"stored must have rows that do not overlap, got rows of 3 elements and a stride of 0",
        {"stored": [torch.ones(1, 3).expand(4, 3), torch.ones(4)]},
    ),
    "states of other rows": (
        "initialize_rows",
        r"state1 must have 4 rows, got 3",
        {"state1": torch.ones(3)},
    ),
    "rows of more dimensions": (
        "read_rows",
        r"cached and stored must have 2 dimensions, got 2 and 1",
        {"stored": torch.ones(4)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_would_leave_memory(case: str) -> None:
    name, message, changes = REFUSED[case]
    with raises_runtime_error(message):
        getattr(native, name)(**(FITTING[name] | changes))


def test_empty_bags_cost_no_time() -> None:
    """As many as there may be, over rows of no columns: a loop over them would take a minute."""
    bags = {"hotness": [0], "batch_size": 2**31 - 1}
    no_columns = WEIGHT[:, :0].contiguous()
    forward = FITTING["pooled_lookup_forward"] | bags | {"weight": no_columns, "rows": NO_IDS}
    assert native.pooled_lookup_forward(**forward).shape == (2**31 - 1, 1, 0)
    map_of = FITTING["pooled_lookup_gradient_map"] | bags | {"ids_like": NO_IDS}
    assert native.pooled_lookup_gradient_map(**map_of)[0].numel() == 0
    backward = {"weight": no_columns, "rows": NO_IDS, "hotness": [0]}
    backward["grad"] = torch.empty(2**31 - 1, 1, 0)
    assert (
        native.pooled_lookup_weights_backward(
            **(FITTING["pooled_lookup_weights_backward"] | backward)
        ).numel()
        == 0
    )


def test_features_without_samples_take_no_memory() -> None:
    arguments = {"offsets": torch.tensor([0]), "batch_size": 0, "num_features": 2**30}
    out = native.pooled_lookup_forward(
        **(FITTING["pooled_lookup_forward"] | arguments | {"rows": NO_IDS})
    )
    assert out.shape == (0, 2**30, 2)


ANY_NUMBER = st.one_of(
    st.integers(-3, 6), st.sampled_from([2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
)
ANY_IDS = st.lists(ANY_NUMBER, max_size=70).map(lambda ids: torch.tensor(ids, dtype=torch.int64))


@hypothesis.given(
    ids=ANY_IDS,
    offsets=st.none() | ANY_IDS,
    hotness=st.lists(ANY_NUMBER, max_size=4),
    num_features=ANY_NUMBER,
    batch_size=ANY_NUMBER,
    num_rows=ANY_NUMBER,
    mean=st.booleans(),
)
def test_any_bags_are_taken_or_refused(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    hotness: list[int],
    num_features: int,
    batch_size: int,
    num_rows: int,
    mean: bool,
) -> None:
    grouping = {
        "offsets": offsets,
        "hotness": hotness,
        "num_features": num_features,
        "batch_size": batch_size,
        "mean": mean,
    }
    tables = {
        "first_rows": torch.full((len(hotness),), num_rows),
        "num_rows": torch.full((len(hotness),), num_rows),
    }
    grad = torch.ones(max(min(batch_size, 6), 0), max(min(num_features, 6), 0), 2)
    given = {"values": ids, "rows": ids, "ids_like": ids, "grad": grad, **grouping, **tables}
    for name in (
        "linearize_ids",
        "pooled_lookup_forward",
        "pooled_lookup_gradient_map",
        "pooled_lookup_weights_backward",
        "sequence_lookup_forward",
        "find_runs",
    ):
        fitting = FITTING[name]
        changes = {key: value for key, value in given.items() if key in fitting}
        if name == "find_runs":
            changes["num_rows"] = num_rows
        with contextlib.suppress(RuntimeError):
            getattr(native, name)(**(fitting | changes))


@hypothesis.given(
    keys=st.lists(ANY_NUMBER, max_size=12),
    tables=st.integers(-3, 3),
    slots=ANY_NUMBER,
    geometry=st.lists(ANY_NUMBER, min_size=8, max_size=8),
    policy=ANY_NUMBER,
    epoch=ANY_NUMBER,
)
def test_any_hash_tables_are_taken_or_refused(
    keys: list[int], tables: int, slots: int, geometry: list[int], policy: int, epoch: int
) -> None:
    ids = torch.tensor(keys, dtype=torch.int64)
    number = torch.tensor([epoch])
    given = {
        "keys": ids,
        "tables": torch.full(ids.shape, tables, dtype=torch.int32),
        "slots": torch.full_like(ids, slots),
        "geometry": torch.tensor(geometry).reshape(2, 4),
        "policy": policy,
        "epoch": number,
        "epoch_number": number,
        "released": number,
        "scores": None if policy == 0 else torch.full((8,), epoch),
        "scores_in": ids if policy == 3 else None,
        "counters": torch.zeros(2, 11, dtype=torch.int64),
    }
    for name in raw_hash_calls.FITTING:
        fitting = FITTING[name]
        changes = {key: value for key, value in given.items() if key in fitting}
        with contextlib.suppress(RuntimeError):
            getattr(native, name)(**(fitting | changes))


@hypothesis.given(
    numbers=st.lists(ANY_NUMBER, min_size=6, max_size=6),
    rows=st.lists(ANY_NUMBER, min_size=3, max_size=3),
    epoch=ANY_NUMBER,
)
def test_any_row_caches_are_taken_or_refused(
    numbers: list[int], rows: list[int], epoch: int
) -> None:
    given = {
        "rows": torch.tensor(rows),
        "unique_rows": torch.tensor(sorted(rows)),
        "num_unique": torch.tensor([3], dtype=torch.int32),
        "epoch": torch.tensor([epoch]),
        "slot_of_row": torch.tensor(numbers[:4]).int(),
        "row_of_slot": torch.tensor(numbers[4:]),
        "hand": torch.tensor(numbers[:1]),
        "slots": torch.tensor(rows),
        "written_rows": torch.tensor(numbers[:2]),
        "read_rows": torch.tensor(numbers[2:4]),
        "count": torch.tensor(rows[:1]),
    }
    for name in raw_cache_calls.FITTING:
        fitting = FITTING[name]
        changes = {key: value for key, value in given.items() if key in fitting}
        if name in ("move_rows", "exchange_places"):
            changes["slots"] = torch.tensor(numbers[4:]).int()
        with contextlib.suppress(RuntimeError):
            getattr(native, name)(**(fitting | changes))
