"""Exchanges by push: ranks store rectangles and means into each other's memory, wait for each other
at a barrier, and collect what arrived."""

from torchembed.ops.push.function import (
    Exchange,
    collect,
    copy_rectangles,
    push,
    push_barrier,
    push_mean,
    push_pooled_lookup,
)

__all__ = [
    "Exchange",
    "collect",
    "copy_rectangles",
    "push",
    "push_barrier",
    "push_mean",
    "push_pooled_lookup",
]
