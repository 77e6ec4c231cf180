"""Exchanges by push: ranks store rectangles and means into each other's memory, then wait for each
other; what arrived is collected."""

from torchembed.ops.push.function import (
    Exchange,
    collect,
    move,
    push,
    push_barrier,
    push_mean,
    push_pooled_lookup,
)
from torchembed.ops.push.moves import Move, Moves, moves_on

__all__ = [
    "Exchange",
    "Move",
    "Moves",
    "collect",
    "move",
    "moves_on",
    "push",
    "push_barrier",
    "push_mean",
    "push_pooled_lookup",
]
