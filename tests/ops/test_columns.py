"""``join_columns`` beside ``torch.cat``, and its gradients of two orders."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.support.sizes import Sizes
from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal
from torchembed.ops.columns import join_columns


def expected(
    parts: Sequence[Tensor], targets: Sequence[int], widths: Sequence[int], num_reserved: int
) -> Tensor:
    """All columns but the reserved ones, by ``torch.cat``."""
    pieces = list(torch.cat(list(parts), dim=1).split(list(widths), dim=1))
    in_order = sorted(range(len(targets)), key=lambda piece: targets[piece])
    assert [targets[p] for p in in_order[:1]] == [num_reserved]
    return torch.cat([pieces[piece] for piece in in_order], dim=1)


def pieces_in_order(
    order: Sequence[int], widths: Sequence[int], num_reserved: int
) -> tuple[list[int], int]:
    """The first column of each piece where they follow each other in ``order``, and the end."""
    targets, end = [0] * len(widths), num_reserved
    for piece in order:
        targets[piece] = end
        end += widths[piece]
    return targets, end


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int], int]:
    """Rows, widths of the pieces of each part, an order of all pieces, and reserved columns."""
    widths = draw(
        st.lists(
            st.lists(st.sampled_from([1, 2, 3, 8, 16]), max_size=4), min_size=1, max_size=4
        ).filter(any)
    )
    num_pieces = sum(map(len, widths))
    order = draw(st.permutations(range(num_pieces)))
    return draw(st.integers(0, 5)), widths, list(order), draw(st.sampled_from([0, 1, 8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_columns_and_gradients(dtype: torch.dtype, sizes: Sizes, device: torch.device) -> None:
    @settings(max_examples=sizes.num_examples)
    @given(layout=layouts())
    def check(layout: tuple[int, list[list[int]], list[int], int]) -> None:
        num_rows, widths_of_parts, order, num_reserved = layout
        widths = [width for of_part in widths_of_parts for width in of_part]
        targets, num_columns = pieces_in_order(order, widths, num_reserved)
        parts = [
            normal(num_rows, sum(of_part), seed=number, dtype=dtype).to(device).requires_grad_()
            for number, of_part in enumerate(widths_of_parts)
        ]
        joined = join_columns(parts, targets, widths, num_columns)
        assert joined.shape == (num_rows, num_columns)
        reference = expected(parts, targets, widths, num_reserved)
        assert_same_bits(joined[:, num_reserved:].detach(), reference.detach())
        grad = normal(num_rows, num_columns, seed=9, dtype=dtype).to(device)
        found = torch.autograd.grad(joined, parts, grad)
        wanted = torch.autograd.grad(reference, parts, grad[:, num_reserved:])
        for of_part, other in zip(found, wanted, strict=True):
            assert_same_bits(of_part, other)

    check()


def test_second_gradients(device: torch.device) -> None:
    parts = [normal(3, 5, seed=1).to(device).requires_grad_() for _ in range(2)]
    targets, widths = [9, 2, 4, 7], [3, 2, 3, 2]
    factors = normal(3, 12, seed=2).to(device).requires_grad_()
    joined = join_columns(parts, targets, widths, 12)
    first = torch.autograd.grad((joined[:, 2:] * factors[:, 2:]).sum(), parts, create_graph=True)
    of_squares = torch.stack([(of_part**2).sum() for of_part in first]).sum()
    (found,) = torch.autograd.grad(of_squares, factors)
    # The gradients of the parts are the factors, elsewhere; those of their squares twice these.
    assert_same_bits(found[:, 2:], 2 * factors[:, 2:].detach())
    assert_same_bits(found[:, :2], torch.zeros(3, 2, device=device))


def test_parts_and_gradients_with_gaps_between_rows(device: torch.device) -> None:
    wide = normal(4, 9, seed=1).to(device)
    spread = normal(4, 1, seed=2).to(device).expand(4, 3)
    parts = [wide[:, 2:6].requires_grad_(), spread.requires_grad_(), wide.T[:4, :4].T]
    joined = join_columns(parts, [3, 0, 7], [4, 3, 4], 11)
    assert_same_bits(joined.detach(), torch.cat([parts[1], parts[0], parts[2]], dim=1).detach())
    of_sum = torch.autograd.grad(joined.sum(), parts[:2])
    assert [grad.tolist() for grad in of_sum] == [[[1.0] * 4] * 4, [[1.0] * 3] * 4]
    grad = normal(4, 30, seed=3).to(device)[:, 4:15]
    joined = join_columns(parts, [3, 0, 7], [4, 3, 4], 11)
    of_first, _ = torch.autograd.grad(joined, parts[:2], grad)
    assert_same_bits(of_first, grad[:, 3:7])


def test_can_be_compiled(device: torch.device) -> None:
    parts = [normal(3, 4, seed=1).to(device), normal(3, 2, seed=2).to(device)]

    def joined(first: Tensor, second: Tensor) -> Tensor:
        return join_columns([first, second], [2, 0], [4, 2], 6)

    compiled = compiled_once(joined)
    assert_same_bits(compiled(*parts), torch.cat([parts[1], parts[0]], dim=1))
