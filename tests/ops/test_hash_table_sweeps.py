"""Erasing, exporting and growing hash tables, and scores that are assigned."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import lanes
from tests.support.hash_tables import (
    Tables,
    assert_counters_add_up,
    assert_equal_tables,
    copy_of,
    int64,
)
from tests.support.tracing import compiled_once
from torchembed.ops.hash_table import (
    Counter,
    ExportedKeys,
    HashTables,
    Policy,
    SlotRange,
    TableShape,
    assign_scores,
    coldest,
    erase_if,
    erase_keys,
    export_keys,
    grow,
    slot_ranges,
    table_shape,
)

FOUR = TableShape(1, 1, 4)
SEVERAL = TableShape(2, 3, 4)


def erase(tables: Tables, keys: list[int], released: int, table: int = 0) -> list[int]:
    ids = torch.tensor(keys, dtype=torch.int64, device=tables.device)
    epoch = int64(released, device=tables.device)
    return erase_keys(tables.tables, ids, tables.numbers(ids, table), released=epoch).tolist()


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.LFU])
def test_erased_keys_leave_free_slots(policy: Policy, device: torch.device) -> None:
    tables = Tables([FOUR, FOUR], policy, device)
    tables.train([1, 2, 3, 4, 2], [0, 0, 0, 1, 1])
    held = tables.held()
    assert erase(tables, [2, 9, 3, 2], released=1) == [held[2], -1, held[3], held[2]]
    assert list(tables.held()) == [1] and sorted(tables.held(1)) == [2, 4]
    assert (tables.count(Counter.ERASED), tables.count(Counter.SIZE)) == (2, 1)
    for state in (tables.tables.digests, tables.tables.keys, tables.tables.touched):
        assert int(state[held[2]]) == 0
    assert erase(tables, [2, 3], released=1) == [-1, -1]
    result = tables.train([5, 6, 7])
    assert not result.is_evicted.any() and sorted(tables.held()) == [1, 5, 6, 7]
    assert_counters_add_up(tables.tables)


def test_rows_in_use_are_not_erased(device: torch.device) -> None:
    tables = Tables([FOUR], device=device)
    tables.train([1, 2])
    tables.train([2, 3])
    held = tables.held()
    assert erase(tables, [1, 2, 2, 3], released=1) == [held[1], -1, -1, -1]
    assert sorted(tables.held()) == [2, 3]
    assert (tables.count(Counter.IN_USE), tables.count(Counter.ERASED)) == (2, 1)


def test_erasing_from_nothing(device: torch.device) -> None:
    for shapes in ([], [TableShape(0, 0, 0)], [FOUR]):
        tables = Tables(shapes, device=device)
        before = copy_of(tables.tables)
        assert erase(tables, [1, 1], 0, table=-1) == [-1, -1]
        assert erase(tables, [], 0, table=-1) == []
        assert_equal_tables(tables.tables, before)


def test_scores_are_assigned(device: torch.device) -> None:
    tables = Tables([FOUR], Policy.CALLER, device)
    tables.train([1, 2, 3], scores=[5, 6, 7])
    held = tables.held()
    keys = torch.tensor([3, 1, 9, 3], device=device)
    scores = torch.tensor([-4, 50, 99, -8], device=device)
    slots = assign_scores(tables.tables, keys, tables.numbers(keys, 0), scores)
    assert slots.tolist() == [held[3], held[1], -1, held[3]]
    assert tables.tables.scores is not None
    assert [int(tables.tables.scores[held[key]]) for key in (1, 2, 3)] == [50, 6, -4]
    assert tables.tables.touched.max() == 1
    nothing = Tables([], Policy.CALLER, device)
    none = assign_scores(nothing.tables, keys, nothing.numbers(keys, -1), scores)
    assert none.tolist() == [-1] * 4


def exported(result: ExportedKeys) -> list[tuple[int, int, int, int]]:
    num_keys = int(result.num_keys)
    assert (result.slots[num_keys:] == -1).all()
    assert not result.keys[num_keys:].any() and not result.scores[num_keys:].any()
    columns = (result.slots, result.keys, result.scores, result.touched)
    return list(zip(*[column[:num_keys].tolist() for column in columns], strict=True))


@pytest.mark.parametrize("piece", [1, 3, 8, 100])
def test_pieces_of_an_export_are_the_table(piece: int, device: torch.device) -> None:
    tables = Tables([FOUR, SEVERAL], Policy.LFU, device)
    tables.train([1, 1, 2, 7], [0, 1, 1, 1])
    tables.train([2, 2, 3], [1, 1, 1])
    whole = slot_ranges(tables.shapes)[1]
    rows = [
        row for part in whole.pieces(piece) for row in exported(export_keys(tables.tables, part))
    ]
    assert rows == exported(export_keys(tables.tables, whole))
    held = tables.held(1)
    assert rows == sorted(
        [(held[1], 1, 1, 1), (held[2], 2, 3, 2), (held[7], 7, 1, 1), (held[3], 3, 1, 2)]
    )
    changed = export_keys(tables.tables, whole, whole.of(tables.tables.touched) > 1)
    assert sorted(key for _, key, _, _ in exported(changed)) == [2, 3]


def test_worked_example_of_export(device: torch.device) -> None:
    tables = Tables([FOUR, FOUR], device=device)
    tables.tables.digests[torch.tensor([5, 7], device=device)] = 1
    tables.tables.keys[5], tables.tables.keys[7] = 30, 9
    result = export_keys(tables.tables, SlotRange(1, 4, 4))
    assert result.slots.tolist() == [5, 7, -1, -1] and result.keys.tolist() == [30, 9, 0, 0]
    assert result.num_keys.tolist() == [2]


def test_keys_unused_for_long_are_erased(device: torch.device) -> None:
    tables = Tables([FOUR, SEVERAL], device=device)
    for keys in ([1, 2], [3], [2, 4], [5]):
        tables.train(keys, 1)
    slots = slot_ranges(tables.shapes)[1]
    held = tables.held(1)
    is_old = slots.of(tables.tables.touched) < 4
    erased = erase_if(
        tables.tables,
        slots,
        is_old,
        reason=Counter.EVICTED_EXPIRED,
        epoch=int64(4, device=device),
        released=int64(2, device=device),
    )
    gone = {int(key) + slots.first_slot for key in erased.is_erased.nonzero().flatten()}
    assert gone == {held[1], held[3]}  # 2 and 4 are in use
    assert sorted(erased.keys[erased.is_erased].tolist()) == [1, 3]
    assert not erased.keys[~erased.is_erased].any()
    assert sorted(tables.held(1)) == [2, 4, 5]
    assert tables.count(Counter.EVICTED_EXPIRED, 1) == 2
    assert tables.count(Counter.EVICTED_AGE, 1) == 3 + 2
    assert_counters_add_up(tables.tables)


@pytest.mark.parametrize(
    ("num_kept", "gone"), [(0, [1, 2, 4]), (1, [1, 2, 4]), (2, [1, 2]), (3, [1]), (4, []), (9, [])]
)
def test_a_table_shrinks_to_a_target(num_kept: int, gone: list[int], device: torch.device) -> None:
    """By score, then by last use; 3, the coldest but for 1, is in use."""
    tables = Tables([SEVERAL], Policy.CALLER, device)
    tables.train([1, 4], scores=[-5, 8])
    tables.train([2], scores=[8])
    tables.train([2], scores=[2])
    tables.train([3], scores=[0])
    (slots,) = slot_ranges(tables.shapes)
    released = int64(3, device=device)
    chosen = coldest(tables.tables, slots, int64(num_kept, device=device), released=released)
    erased = erase_if(
        tables.tables,
        slots,
        chosen,
        reason=Counter.EVICTED_TARGET,
        epoch=int64(4, device=device),
        released=released,
    )
    assert sorted(erased.keys[erased.is_erased].tolist()) == gone
    assert tables.count(Counter.EVICTED_TARGET) == len(gone)
    assert tables.count(Counter.SIZE) == 4 - len(gone)


def test_grown_tables_hold_the_same(device: torch.device) -> None:
    shapes = [TableShape(1, 2, 8), TableShape(2, 3, 16, num_spare=5), TableShape(3, 1, 8)]
    tables = Tables(shapes, Policy.LFU, device)
    keys = torch.arange(-20 if lanes.is_interpreted() else -90, 90, device=device)
    for table in range(3):
        tables.train(keys, table)
        tables.train(keys[::3], table)
    before = copy_of(tables.tables)
    new_shapes = [shapes[0]._replace(num_blocks=8), shapes[1]._replace(num_blocks=4), shapes[2]]
    grown, new_slots = grow(tables.tables, shapes, new_shapes)
    assert_equal_tables(tables.tables, before)
    for table in range(3):
        old, new = tables.held(table), Tables.of(grown, new_shapes, Policy.LFU).held(table)
        assert {key: int(new_slots[slot]) for key, slot in old.items()} == new
    is_held = before.digests > 0
    spare = torch.arange(16 + 96, 16 + 96 + 5, device=device)
    assert torch.equal(new_slots[spare], spare + 7 * 16 + 2 * 48)
    is_held[spare] = True
    assert (new_slots[~is_held] == -1).all()
    is_held[spare] = False
    for state, old_state in zip(grown[:4], before[:4], strict=True):
        assert state is not None and old_state is not None
        assert torch.equal(state[new_slots[is_held]], old_state[is_held])
    assert int((grown.digests > 0).sum()) == int(is_held.sum())
    after = Tables.of(grown, new_shapes, Policy.LFU, epoch=tables.epoch)
    found = after.find(keys, 1)
    was_held = torch.tensor([int(key) in tables.held(1) for key in keys], device=device)
    assert torch.equal(found >= 0, was_held)
    after.train(keys, 0)
    assert len(after.held(0)) > len(tables.held(0))
    assert_counters_add_up(grown)


def test_grows_to_its_capacity(device: torch.device) -> None:
    """A table that starts small holds what one of the full capacity holds."""
    capacity = 120 if lanes.is_interpreted() else 1000
    shape = table_shape(capacity, capacity // 8, block_slots=capacity // 8)
    tables = Tables([shape], device=device)
    keys = torch.arange(capacity * 2 // 3, device=device) * 7
    for part in keys.chunk(8):
        tables.train(part)
        if tables.count(Counter.SIZE) > shape.num_rows // 2 and shape.num_rows < capacity:
            larger = shape._replace(num_blocks=shape.num_blocks * 2)
            grown, _ = grow(tables.tables, [shape], [larger])
            shape = larger
            tables = Tables.of(grown, [shape], Policy.LRU, epoch=tables.epoch)
    assert shape.num_rows >= capacity and tables.count(Counter.EVICTED_FULL) == 0
    assert (tables.find(keys) >= 0).all()


def test_sweeps_compile_whole(device: torch.device) -> None:
    tables = Tables([SEVERAL], Policy.LFU, device)
    tables.train([1, 2, 3, 2])
    (slots,) = slot_ranges(tables.shapes)

    def swept(held: HashTables, kept: Tensor, epoch: Tensor) -> Tensor:
        chosen = coldest(held, slots, kept, released=epoch)
        erase_if(held, slots, chosen, reason=Counter.ERASED, epoch=epoch, released=epoch)
        return export_keys(held, slots).keys

    expected = swept(copy_of(tables.tables), int64(1, device=device), int64(1, device=device))
    compiled = compiled_once(swept)
    result = compiled(tables.tables, int64(1, device=device), int64(1, device=device))
    assert torch.equal(result, expected) and result[0] == 2


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "reason": (
        ValueError,
        r"^reason must be one of ERASED, EVICTED_EXPIRED, EVICTED_TARGET, got <Counter.HITS: 1>$",
        {"reason": Counter.HITS},
    ),
    "mask of another dtype": (
        TypeError,
        r"^is_chosen must be bool, got int64; call \.bool\(\)$",
        {"is_chosen": torch.ones(4, dtype=torch.int64)},
    ),
    "mask of another size": (
        ValueError,
        r"^is_chosen must have shape \(4,\) \(one for each slot\), got \(3,\)$",
        {"is_chosen": torch.ones(3, dtype=torch.bool)},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_sweeps(name: str) -> None:
    error, message, changes = ERRORS[name]
    tables = Tables([FOUR])
    chosen = torch.ones(4, dtype=torch.bool)
    fitting: dict[str, Any] = {"is_chosen": chosen, "reason": Counter.ERASED}
    epochs: dict[str, Any] = {"epoch": int64(1), "released": int64(1)}
    with pytest.raises(error, match=message):
        erase_if(tables.tables, SlotRange(0, 0, 4), **(fitting | changes), **epochs)


def test_errors_of_scores_and_shapes() -> None:
    keys, tables = int64(3), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^hash_tables must have scores, got LRU's"):
        assign_scores(Tables([FOUR]).tables, keys, tables, keys)
    held = Tables([FOUR], Policy.LFU).tables
    with pytest.raises(TypeError, match=r"^scores must be int64, got int32; call \.long\(\)$"):
        assign_scores(held, keys, tables, keys.int())
    with pytest.raises(ValueError, match=r"^scores must hold 1 elements \(as keys has\), got 2$"):
        assign_scores(held, keys, tables, int64(1, 2))
    for new_shape in (TableShape(3, 1, 4), TableShape(2, 1, 5), TableShape(0, 1, 4)):
        message = r"^new_shapes\[0\] must have the blocks of \(1, 1, 4, 0\), doubled any number of"
        with pytest.raises(ValueError, match=message):
            grow(held, [FOUR], [new_shape])
