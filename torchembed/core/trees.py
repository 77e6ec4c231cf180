"""The tensors of nested tuples, lists, dicts and dataclasses."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")

Tree: TypeAlias = Any
"""Tensors in nested tuples, named ones too, lists, dicts and dataclasses; whatever else is in it is
kept as it is. Python's types cannot say that, and users bring trees of their own."""

_PLAIN = frozenset((bool, int, float, str, type(None)))


def _is_plain(tree: tuple[Any, ...] | list[Any]) -> bool:
    """Whether there are plain values only in it, as in names and counts: for every step's sake
    these are not looked at one by one."""
    return _PLAIN.issuperset(map(type, tree))


@functools.cache
def field_names(kind: type, *, made_of: bool = True) -> tuple[str, ...] | None:
    """The fields of a dataclass, of which one is ``made_of`` or all; None for other types."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(f.name for f in dataclasses.fields(kind) if f.init or not made_of)


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """``tree`` with ``function(tensor)`` in place of each tensor, which it is called for in order.

    A tree is nested of tuples, named ones too, lists, dicts and dataclasses. Anything else in it is
    kept as it is.
    """
    return _map(function, tree)


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        parts = [_map(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, list):
        return [_map(function, part) for part in tree]
    if isinstance(tree, dict):
        return {key: _map(function, part) for key, part in tree.items()}
    names = field_names(type(tree))
    if names is None:
        return tree
    return dataclasses.replace(
        tree, **{name: _map(function, getattr(tree, name)) for name in names}
    )


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of ``tree``, in the order of :func:`map_tensors`."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        if not _is_plain(tree):
            for part in tree:
                _collect(part, found)
    elif isinstance(tree, dict):
        for part in tree.values():
            _collect(part, found)
    elif type(tree) not in _PLAIN:
        for name in field_names(type(tree)) or ():
            _collect(getattr(tree, name), found)


def layout_of(tree: Any) -> Hashable:
    """Equal for trees that differ in the contents of their tensors alone; None where something in
    ``tree`` is neither part of a tree, as :func:`map_tensors` says, nor a plain value."""
    try:
        return _layout(tree)
    except _OpaqueError:
        return None


class _OpaqueError(Exception):
    pass


def _layout(tree: Any) -> Hashable:
    if isinstance(tree, Tensor):
        return Tensor, tree.shape, tree.dtype
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if isinstance(tree, (tuple, list)):
        return kind, tuple(tree if _is_plain(tree) else [_layout(part) for part in tree])
    if isinstance(tree, dict):
        return dict, tuple((key, _layout(part)) for key, part in tree.items())
    names = field_names(kind, made_of=False)
    if names is None:
        raise _OpaqueError
    return kind, *[_layout(getattr(tree, name)) for name in names]
