"""Vectors and gradients by push are those of the all-to-all, bit for bit.

Real GPUs are in tests/gpu/test_push.py. Here ranks are processes that map each other's memory; the
references run, or Triton's interpreter.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchembed
from tests.support.lanes import is_interpreted
from tests.support.pushing import (
    CASES,
    DYNAMIC,
    LATE,
    WIRES,
    MappedMemory,
    assert_same_arrays,
    late_rank,
    sharded_model,
    vectors_and_gradients,
)
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import made_mesh, make_batch, make_model, vectors_of
from torchembed.autograd.gradient_slots import FlatSpans
from torchembed.core.copies.rectangles import RectangleCopy, joined_moves
from torchembed.sharding import WireTransport, make_plan
from torchembed.sharding.transport.channel import PushDomain
from torchembed.sharding.transport.layout import Layout, slot_parts
from torchembed.sharding.transport.peer_access import peer_problem
from torchembed.sharding.transport.pooled_push import (
    backward_moves,
    forward_moves,
    received_columns,
)
from torchembed.sharding.transport.pushed_mean import NUM_LANES, PushedMean, shares
from torchembed.tables import TableSpec

MEANS = [
    (torch.float32, torch.float32, [(0, 300)]),
    (torch.float32, torch.bfloat16, [(64, 128), (192, 256)]),
    (torch.bfloat16, torch.float32, [(0, 64)]),
]
"""Dtype, that in which it travels, and parts of 300 numbers."""


def numbers_of(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(300, generator=generator).to(dtype)


def means(memory: MappedMemory) -> list[np.ndarray]:
    """On a rank: its numbers once parts of them are means, which are taken in each lane."""
    domain, found = PushDomain(dist.group.WORLD, torch.device("cpu"), allocate=memory), []
    push = PushedMean(domain, "a test")
    for dtype, wire, spans in MEANS:
        for lane in range(NUM_LANES):
            # A buffer that spans are of has no partial row.
            flat = torch.nn.functional.pad(numbers_of(dist.get_rank(), dtype), (0, 20))
            flat = flat[:300] if spans == [(0, 300)] else flat
            beside = torch.full((70,), 1.0 + dist.get_rank(), dtype=dtype)
            push.average([FlatSpans(flat, spans), FlatSpans(beside, [(0, 70)])], wire, lane)
            assert (beside == (1 + dist.get_world_size()) / 2).all()
        found.append(flat[:300].float().numpy())
    return found


def assert_means(of_ranks: list[list[np.ndarray]]) -> None:
    for rank, found in enumerate(of_ranks):
        for (dtype, wire, spans), numbers in zip(MEANS, found, strict=True):
            expected = numbers_of(rank, dtype).float()
            sent = [numbers_of(r, dtype).to(wire).float() for r in range(len(of_ranks))]
            mean = (sum(sent, torch.zeros(300)) / len(of_ranks)).to(wire).to(dtype).float()
            for start, stop in spans:
                expected[start:stop] = mean[start:stop]
            np.testing.assert_array_equal(numbers, expected.numpy())


def vectors_of_two(memory: MappedMemory | None) -> list[np.ndarray]:
    """On a rank: the vectors of a batch that was looked up ahead and of one beside it, in either
    order, and the gradients of all weights."""
    model = sharded_model(CASES[0], WIRES[1], "cpu", WireTransport.COLLECTIVE, memory)
    tables, found = model.tables, []
    for step in range(3):
        ahead, beside = (make_batch(CASES[0], dist.get_rank(), step + k) for k in range(2))
        with tables.reusing([tables.look_up(tables.prepare(ahead))]):
            order = (ahead, beside) if step % 2 else (beside, ahead)
            vectors = torch.cat([vectors_of(tables(batch)) for batch in order])
        (vectors * torch.linspace(-1, 1, vectors.numel()) ** 3).sum().backward()
        found.append(vectors.detach().numpy())
    return [*found, *(p.grad.numpy() for p in model.parameters())]


def on_a_rank(
    folder: str,
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]], list[Any]]:
    """By the all-to-all, and by push; and means."""
    pairs = list(zip(CASES, WIRES, strict=True))
    if not is_interpreted():  # the interpreter takes a minute to insert the ids
        pairs.append((DYNAMIC, WIRES[0]))
    collective = WireTransport.COLLECTIVE
    plain = [*vectors_and_gradients(pairs, "cpu", collective), vectors_of_two(None)]
    memory = MappedMemory(folder)
    pushed = [*vectors_and_gradients(pairs, "cpu", collective, memory), vectors_of_two(memory)]
    return plain, pushed, means(memory)


def test_push_equals_the_all_to_all_and_takes_means(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(2, on_a_rank, str(tmp_path))
    for plain, pushed, _ in of_ranks:
        assert_same_arrays(plain, pushed)
    assert_means([found for _, _, found in of_ranks])


def late_rank_on_the_cpu(folder: str) -> str:
    return late_rank("cpu", 2e-6, MappedMemory(folder))


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, late_rank_on_the_cpu, str(tmp_path))
    assert re.match(LATE, first)
    assert not second


def layout_of(num_ranks: int, placements: dict[str, str]) -> Layout:
    """The layout of three tables with one slot each."""
    dims = {"a": 4, "b": 8, "c": 2}
    specs = {name: TableSpec(name=name, num_rows=8, dim=dim) for name, dim in dims.items()}
    plan = make_plan(specs, num_ranks, placements)
    parts = [part for slot, name in enumerate("abc") for part in slot_parts(slot, plan.table(name))]
    return Layout(parts, num_ranks)


@pytest.mark.parametrize("batch_sizes", [(3, 2, 4), (0, 5, 1)])
def test_moves_are_inverse_and_fill_each_home_once(batch_sizes: tuple[int, ...]) -> None:
    layout = layout_of(3, {"a": "row_wise", "b": "column_wise", "c": "table_wise"})
    home, num_samples = received_columns(layout), sum(batch_sizes)
    widths = [sum(block.num_columns for block in blocks) for blocks in layout.blocks]
    # Of element (sample, column) of each rank's pooled vectors, a number of its own.
    pooled = [
        (1 + rank * 1000 + torch.arange(num_samples * width)).view(num_samples, width)
        for rank, width in enumerate(widths)
    ]
    homes = [torch.zeros(size, home.num_columns, dtype=torch.int64) for size in batch_sizes]
    for rank, source in enumerate(pooled):
        apply_moves(
            source, forward_moves(layout, batch_sizes, rank, range(len(layout.blocks[rank]))), homes
        )
    for rank, vectors in enumerate(homes):
        start = sum(batch_sizes[:rank])
        from_ranks = [source[start : start + batch_sizes[rank]] for source in pooled]
        expected = torch.zeros_like(vectors)
        for source, columns, blocks in zip(from_ranks, home.columns, layout.blocks, strict=True):
            column = 0
            for first, block in zip(columns, blocks, strict=True):
                width = block.num_columns
                expected[:, first : first + width] = source[:, column : column + width]
                column += width
        assert torch.equal(vectors, expected)
        assert (vectors > 0).all()
    back = [torch.zeros_like(source) for source in pooled]
    for rank, vectors in enumerate(homes):
        apply_moves(vectors, backward_moves(layout, batch_sizes, rank, home.columns), back)
    assert all(map(torch.equal, back, pooled))


def apply_moves(source: Tensor, moves: list[tuple[int, ...]], targets: list[Tensor]) -> None:
    """The effect of the kernel, where no element is stored twice."""
    for rank, num_rows, num_columns, row, column, target, stride in moves:
        if num_rows:
            shape = num_rows, num_columns
            part = targets[rank].view(-1).as_strided(shape, (stride, 1), target)
            assert not part.any()
            part.copy_(source[row : row + num_rows, column : column + num_columns])


def test_parts_are_side_by_side_at_home_and_shards_in_the_order_of_ranks() -> None:
    home = received_columns(layout_of(2, {"a": "row_wise", "b": "column_wise", "c": "table_wise"}))
    # Two shards of rows of a, 4 columns each; two parts of b; c is where there is most room.
    assert home.widths == [[4, 4], [4], [4], [2]]
    assert [columns[:2] for columns in home.columns] == [[0, 8], [4, 12]]
    assert sorted(first for columns in home.columns for first in columns) == [0, 4, 8, 12, 16]


def test_where_gpus_cannot_push() -> None:
    hosts = [("one", "gpu-0"), ("one", "gpu-1"), ("two", "gpu-0"), ("one", "gpu-1")]
    assert peer_problem(hosts[:2], 0) is None
    assert peer_problem(hosts[:3], 1) == "rank 2 is on two and not on one"
    assert peer_problem([hosts[0], hosts[1], hosts[3]], 2) == "rank 1 uses the same GPU"


def refusals() -> list[str]:
    """The words of a rank without GPUs."""
    said: list[str] = []
    model, mesh = make_model(CASES[0], "meta"), made_mesh("cpu", 1)
    for transport in (WireTransport.PUSH, "push"):
        with pytest.raises((TypeError, ValueError)) as caught:
            torchembed.shard_embeddings(model, mesh, transport=transport)
        said.append(str(caught.value))
    return said


def test_a_transport_that_cannot_be_taken_is_refused() -> None:
    for cpu, unknown in run_on_ranks(1, refusals):
        assert re.match(
            r"transport must be WireTransport.COLLECTIVE on cpu, got Wire.*PUSH; on", cpu
        )
        assert re.match("transport must be a WireTransport, got 'push'", unknown)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("spans", [[(0, 5)], [(2, 3), (7, 20)], [(0, 1)]])
@pytest.mark.parametrize("before", [0, 3])
def test_each_rank_takes_a_share_of_the_spans(
    num_ranks: int, spans: list[tuple[int, int]], before: int
) -> None:
    rows = [row for start, stop in spans for row in range(start, stop)]
    rows_a_rank = -(-(before + len(rows)) // num_ranks)
    for rank in range(num_ranks):
        taken = {}
        for peer, size, width, first, column, target, stride in shares(
            spans, before, rows_a_rank, rank, num_ranks
        ):
            assert (width, column, stride) == (64, 0, 64)
            assert 0 <= target - rank * rows_a_rank * 64 <= (rows_a_rank - size) * 64
            for number in range(size):
                place = peer * rows_a_rank + target // 64 - rank * rows_a_rank + number
                taken[place] = first + number
        assert [taken[before + place] for place in range(len(rows))] == rows


def test_neighbours_move_together() -> None:
    rows = [(0, 4, 2, 0, 0, 6, 9), (0, 4, 3, 0, 2, 8, 9), (0, 4, 1, 0, 5, 0, 9)]
    moves = [RectangleCopy(*row) for row in rows]
    assert joined_moves(moves) == [(0, 4, 5, 0, 0, 6, 9), moves[2]]
    assert joined_moves([]) == []
