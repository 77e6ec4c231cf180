"""Columns of some matrices among those of another one, on a GPU, in one pass each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchembed.sharding.channel import Move

Piece = tuple[int, int, int]
"""Columns that stay side by side: where they begin, how many they are, where they begin there."""


def joined_moves(moves: Sequence[Move]) -> list[Move]:
    """``moves`` of rows of one matrix to another one, in which neighbours are one."""
    joined: list[Move] = []
    for move in moves:
        rank, num_rows, width, row, column, target, stride = move
        if joined:
            before = joined[-1]
            if (before[4] + before[2], before[5] + before[2]) == (column, target):
                joined[-1] = (rank, num_rows, before[2] + width, row, *before[4:6], stride)
                continue
        joined.append(move)
    return joined


def place_columns(values: Tensor, others: Sequence[tuple[Tensor, Sequence[Piece]]]) -> Tensor:
    """``values [B, columns]`` with the columns of ``others``, each with its pieces, in place.

    Gradients go to the others, and to ``values`` all that there are: who made it knows which of its
    columns were its own.
    """
    if not others:
        return values
    tensors, pieces = zip(*others, strict=True)
    return _Place.apply(values, pieces, *tensors)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, pieces: Sequence[Sequence[Piece]], *others: Tensor
    ) -> Tensor:
        ctx.mark_dirty(values)
        ctx.pieces, ctx.shapes = pieces, [other.shape for other in others]
        for other, of_other in zip(others, pieces, strict=True):
            copy_columns(other, of_other, values)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients = []
        for shape, of_other in zip(ctx.shapes, ctx.pieces, strict=True):
            out = grad.new_empty(shape)
            copy_columns(grad, reversed_pieces(of_other), out)
            gradients.append(out)
        return grad, None, *gradients


def reversed_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Back to where they came from."""
    return [(there, width, here) for here, width, there in pieces]


def copy_columns(source: Tensor, pieces: Sequence[Piece], out: Tensor) -> None:
    """Write the ``pieces`` of ``source`` to ``out``, which has as many rows and is contiguous."""
    from torchembed.triton_kernels.push import launch_moves, moves_on

    if source.stride(1) != 1:
        source = source.contiguous()
    num_rows, stride = out.shape
    moves = [(0, num_rows, width, 0, here, there, stride) for here, width, there in pieces]
    launch_moves(source, moves_on(out.device, tuple(joined_moves(moves))), out)
