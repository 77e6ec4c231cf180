"""Pieces of tensors in another order, by ``torch.cat`` and by one gather."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchembed.core.piece_order import PieceOrder, in_order

SIZES, ORDER = [2, 0, 3, 1], [3, 0, 2, 0]


@st.composite
def _orders(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    return sizes, draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))


def _numbers(count: int) -> list[int]:
    return [10 + number for number in range(count)]


@given(form=_orders(), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_pieces_come_in_the_order_asked_for(
    form: tuple[list[int], list[int]], dtype: torch.dtype, device: torch.device
) -> None:
    sizes, order = form
    numbers = _numbers(sum(sizes))
    starts = [sum(sizes[:piece]) for piece in range(len(sizes))]
    expected = [n for p in order for n in numbers[starts[p] : starts[p] + sizes[p]]]
    tensor = torch.tensor(numbers, dtype=dtype, device=device)
    reorder = PieceOrder()
    # Twice: the second time by what was kept of the first.
    for found in (in_order(tensor, sizes, order), *(reorder(tensor, sizes, order),) * 2):
        assert found.tolist() == expected
        assert found.dtype is dtype


def test_gradients_of_a_piece_that_comes_twice_are_added(device: torch.device) -> None:
    tensor = torch.arange(6.0, device=device, requires_grad=True)
    PieceOrder()(tensor, SIZES, ORDER).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2, 2, 1, 1, 1, 1]


def test_more_forms_than_are_kept(device: torch.device) -> None:
    reorder = PieceOrder()
    tensor = torch.tensor(_numbers(6), device=device)
    for first in range(4):
        for second in range(4):
            order = [first, second]
            assert reorder(tensor, SIZES, order).equal(in_order(tensor, SIZES, order))


@pytest.mark.gpu
def test_a_capture_reads_what_was_kept_and_makes_nothing_new(device: torch.device) -> None:
    reorder = PieceOrder()
    tensor = torch.tensor(_numbers(6), device=device)
    reorder(tensor, SIZES, ORDER)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        known, new = reorder(tensor, SIZES, ORDER), reorder(tensor, SIZES, [2, 3])
    tensor += 100
    graph.replay()
    assert known.tolist() == [115, 110, 111, 112, 113, 114, 110, 111]
    assert new.tolist() == [112, 113, 114, 115]
