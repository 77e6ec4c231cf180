"""The library's kernels of hash tables against Triton's on a GPU, bit for bit."""

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.hash_tables import assert_equal_tables, copy_of
from tests.support.tolerance import assert_same_bits
from torchembed.core.hash_tables import KeyInsertion, SlotTouch
from torchembed.ops.hash_table import (
    Counter,
    HashTables,
    Policy,
    TableShape,
    empty_hash_tables,
    table_shape,
)
from torchembed.ops.hash_table.cuda import (
    find_slots_kernel,
    insert_keys_kernel,
    touch_slots_kernel,
)
from torchembed.triton_kernels.find_slots import launch_find_slots
from torchembed.triton_kernels.insert_keys import launch_insert_keys
from torchembed.triton_kernels.touch_slots import launch_touch_slots

pytestmark = pytest.mark.gpu

SHAPES: dict[str, Sequence[TableShape]] = {
    "buckets that begin anywhere": [table_shape(rows) for rows in (3, 100, 4000, 40_001, 7)],
    "whole buckets": [table_shape(1 << 16), table_shape(1 << 14)],
    "blocks of more buckets than lanes": [
        table_shape(30_000, block_slots=16_384),
        table_shape(5000),
    ],
    "more tables than lanes": [table_shape(50 + 37 * number) for number in range(70)],
    "a table without rows": [TableShape(0, 0, 0), table_shape(1000)],
}


def batch_of(
    shapes: Sequence[TableShape], number: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys, of which some are frequent and some were in batches before, and their tables."""
    generator = torch.Generator(device).manual_seed(number)
    num_rows = sum(shape.num_rows for shape in shapes)
    num_ids = max(num_rows // (1, 2, 7, 50)[number % 4], 40)
    draw = functools.partial(torch.rand, num_ids, generator=generator, device=device)
    keys = (draw() ** 2 * num_rows * 2).long() - num_rows // 2
    tables = (draw() * (len(shapes) + 0.2)).int()
    return keys * 0x9E3779B97F4A7C1, tables.where(tables < len(shapes), -1)


def insertion(
    held: HashTables, keys: Tensor, tables: Tensor, slots: Tensor, policy: Policy, number: int
) -> KeyInsertion:
    device = keys.device

    def scalar(value: int) -> Tensor:
        return torch.tensor([value], device=device)

    generator = torch.Generator(device).manual_seed(number)
    scores = torch.randint(-9, 9, keys.shape, generator=generator, device=device)
    return KeyInsertion(
        keys,
        tables,
        slots,
        keys % 7 != 0 if number % 3 == 2 else None,
        int(policy),
        scalar(number + 1),
        scalar(number // 2) if policy is Policy.EPOCH_LFU else None,
        scalar(number - 1 if number % 5 else 0),
        scores if policy is Policy.CALLER else None,
        torch.tensor([number != 4], device=device) if number % 2 == 0 else None,
        held.digests,
        held.keys,
        held.touched,
        held.scores,
        held.geometry,
        held.counters,
    )


def use(held: HashTables, slots: Tensor, tables: Tensor, policy: Policy, number: int) -> SlotTouch:
    """That of slots in epoch ``number + 1``, in one batch of four of which nothing is trained."""
    device = slots.device
    return SlotTouch(
        slots,
        tables,
        int(policy),
        torch.tensor([number + 1], device=device),
        None,
        None,
        torch.tensor([number % 4 != 3], device=device) if number % 2 else None,
        held.touched,
        held.scores,
        held.counters,
    )


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.LFU], ids=lambda policy: policy.name)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_uses_give_the_same_bits(
    shapes: Sequence[TableShape], policy: Policy, device: torch.device
) -> None:
    touch = touch_slots_kernel()
    assert touch is not None
    held = empty_hash_tables(shapes, policy, device)
    for number in range(6):
        keys, tables = batch_of(shapes, number, device)
        if number % 2:
            tables = tables.sort().values  # most blocks of positions have one table then
        found = launch_find_slots(keys, tables, held.digests, held.keys, held.geometry)
        slots = launch_insert_keys(insertion(held, keys, tables, found, policy, number))[0]
        copied = copy_of(held)
        assert touch.launch(use(held, slots, tables, policy, number)) is None
        launch_touch_slots(use(copied, slots, tables, policy, number))
        assert_equal_tables(held, copied)
    assert held.counters[:, int(Counter.HITS)].any()


@pytest.mark.parametrize("policy", list(Policy), ids=lambda policy: policy.name)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_kernels_give_the_same_bits(
    shapes: Sequence[TableShape], policy: Policy, device: torch.device
) -> None:
    find, insert = find_slots_kernel(), insert_keys_kernel()
    assert find is not None
    assert insert is not None
    held = empty_hash_tables(shapes, policy, device)
    for number in range(9):
        keys, tables = batch_of(shapes, number, device)
        of_tables = held.digests, held.keys, held.geometry
        slots = find.launch(keys, tables, *of_tables)
        assert_same_bits(slots, launch_find_slots(keys, tables, *of_tables))
        copied = copy_of(held)
        results = insert.launch(insertion(held, keys, tables, slots, policy, number))
        expected = launch_insert_keys(insertion(copied, keys, tables, slots, policy, number))
        for result, same in zip(results, expected, strict=True):
            assert_same_bits(result, same)
        assert_equal_tables(held, copied)
    assert held.digests.any()
