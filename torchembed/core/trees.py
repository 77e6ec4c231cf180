"""Trees: nested tuples, lists, mappings, dataclasses and other objects that can be moved between
devices. The only code that walks them.

A tree's leaves are its tensors, or whatever a predicate says:
:mod:`torchembed.step.batches.batch_layout` takes sparse features as leaves.
"""

import collections
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

from torch import Tensor

T = TypeVar("T")
L = TypeVar("L")
"""The type of a tree's leaves."""

Tree: TypeAlias = Any
"""Tensors in nested tuples, named ones too, lists, mappings, dataclasses, and objects of classes of
the user's own that have a method ``to``, as their attributes; anything else in it is kept as it is.
Python's types cannot say that, and users bring trees of their own."""

_PLAIN = frozenset((bool, int, float, str, type(None)))


def _is_plain(tree: tuple[Tree, ...] | list[Tree]) -> bool:
    """True where a sequence holds plain values only, as names and counts do. Every step walks its
    batches, so such sequences are recognized in one pass of C code."""
    return _PLAIN.issuperset(map(type, tree))


def is_plain_value(node: object) -> bool:
    """True where ``node`` is a number, a string or None."""
    return type(node) in _PLAIN


@functools.cache
def _field_names(kind: type, *, init_only: bool = True) -> tuple[str, ...] | None:
    """The names of a dataclass's fields; None for types that are no dataclass, or are mappings."""
    if not dataclasses.is_dataclass(kind) or issubclass(kind, Mapping):
        return None
    return tuple(f.name for f in dataclasses.fields(kind) if f.init or not init_only)


@functools.cache
def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchembed", "torchrec", "tensordict")


@functools.cache
def _has_attributes(kind: type) -> bool:
    """True for classes of the user's own whose objects are trees of their attributes: those with a
    method ``to``. Libraries' keep in theirs what they have computed, too."""
    has_to = callable(getattr(kind, "to", None))
    return has_to and kind.__dictoffset__ != 0 and not _is_of_library(kind)


@functools.cache
def _is_frozen(kind: type) -> bool:
    """True for dataclasses whose fields cannot be set."""
    is_dataclass = _field_names(kind) is not None
    return is_dataclass and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@functools.cache
def _fields_of_library(kind: type) -> Callable[[Tree], tuple[Tree, ...]] | None:
    """A function from a dataclass of a library to its fields, all of which its constructor takes;
    None for other types. One pass of C code, since every step walks its batches."""
    names = _field_names(kind, init_only=False) if _is_of_library(kind) else None
    if names is None or len(names) < 2 or names != _field_names(kind):
        return None
    return operator.attrgetter(*names)


def _parts_of(tree: Tree, *, init_only: bool = True) -> Mapping[Any, Tree] | None:
    """The parts of a mapping, or of a dataclass or another object by its attributes; None for what
    is no tree.

    Args:
        init_only: of dataclasses of libraries, leave out the fields that their constructors set.
    """
    if isinstance(tree, Mapping):
        return tree
    kind = type(tree)
    is_of_library = _is_of_library(kind)
    names = _field_names(kind, init_only=init_only and is_of_library)
    if names is None:
        return vars(tree) if _has_attributes(kind) else None
    parts = {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    if kind.__dictoffset__ and not is_of_library:
        # Also what the user's own constructor has computed.
        parts |= {name: part for name, part in vars(tree).items() if name not in parts}
    return parts


def _with_parts(tree: Tree, parts: dict[Any, Tree]) -> Tree:
    """A tree of the class of ``tree`` with other parts. Calls no constructor of the user's own,
    which may take other arguments and compute what the parts are already."""
    kind = type(tree)
    if isinstance(tree, Mapping):
        if not isinstance(tree, MutableMapping):
            return cast("Callable[..., Tree]", kind)(parts)
        other = _bare_copy(tree)
        for key, part in parts.items():
            other[key] = part
    elif _field_names(kind) is None:
        other = copy.copy(tree)
        vars(other).update(parts)
    elif _is_of_library(kind):
        other = dataclasses.replace(tree, **parts)
    else:
        other = object.__new__(kind)
        for name, part in parts.items():
            object.__setattr__(other, name, part)
    return other


def _bare_copy(tree: MutableMapping[Any, Tree]) -> MutableMapping[Any, Tree]:
    """A mapping like ``tree``, with what it has besides its items; the items may be missing."""
    kind = type(tree)
    if not isinstance(tree, dict) or isinstance(tree, collections.defaultdict):
        return copy.copy(tree)  # type: ignore[type-var]
    # Dicts whose items are attributes too may raise other errors for the methods that copying asks
    # for.
    other = kind.__new__(kind)
    if kind.__dictoffset__:
        if vars(tree) is tree:
            object.__setattr__(other, "__dict__", other)
        else:
            vars(other).update(vars(tree))
    return other


def is_tensor(node: object) -> TypeGuard[Tensor]:
    """True where ``node`` is a leaf of a tree of tensors."""
    return isinstance(node, Tensor)


def map_leaves(
    function: Callable[[L], Tree], tree: Tree, is_leaf: Callable[[object], TypeGuard[L]]
) -> Tree:
    """``tree`` with ``function(leaf)`` in place of each leaf, for which it is called in order.

    Lists, mappings and what else can be changed are new ones; tuples and frozen dataclasses whose
    parts all stay the same are kept.

    Args:
        function: may return anything.
        tree: as :data:`Tree` says; an object of a class of the user's own is copied without a call
            of its constructor. Anything else in it that is no leaf is kept as it is.
        is_leaf: whether a node is a leaf; a leaf may be a tree itself, which is not entered. Not
            asked about plain values.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        if _is_plain(tree):
            return tree if isinstance(tree, tuple) else list(tree)
        parts = [map_leaves(function, part, is_leaf) for part in tree]
        kind = type(tree)
        if isinstance(tree, tuple):
            if all(map(operator.is_, parts, tree)):
                return tree
            make = getattr(kind, "_make", kind)  # of named tuples, whatever their constructor takes
            return make(parts)
        if kind is list:
            return parts
        other = copy.copy(tree)
        other[:] = parts
        return other
    kind = type(tree)
    if kind is dict:
        return {key: map_leaves(function, part, is_leaf) for key, part in tree.items()}
    if kind in _PLAIN:
        return tree
    found = _parts_of(tree)
    if found is None:
        return tree
    mapped = {key: map_leaves(function, part, is_leaf) for key, part in found.items()}
    if _is_frozen(kind) and all(mapped[key] is part for key, part in found.items()):
        return tree
    return _with_parts(tree, mapped)


def leaves_in(tree: Tree, is_leaf: Callable[[object], TypeGuard[L]]) -> list[L]:
    """The leaves of ``tree``, in the order of :func:`map_leaves`."""
    found: list[L] = []
    _collect(tree, is_leaf, found)
    return found


def _collect(tree: Tree, is_leaf: Callable[[object], TypeGuard[L]], found: list[L]) -> None:
    if is_leaf(tree):
        found.append(tree)
        return
    for part in _children(tree):
        if type(part) not in _PLAIN:
            _collect(part, is_leaf, found)


def _children(tree: Tree) -> Iterable[Tree]:
    """The parts of a tree in order; none of what is no tree."""
    kind = type(tree)
    if isinstance(tree, (tuple, list)):
        return () if _is_plain(tree) else tree
    if kind is dict:
        return tree.values()
    get_fields = _fields_of_library(kind)
    if get_fields is not None:
        return get_fields(tree)
    return () if kind in _PLAIN else (_parts_of(tree) or {}).values()


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """``tree`` with ``function(tensor)`` in place of each tensor, as :func:`map_leaves` does."""
    return map_leaves(function, tree, is_tensor)


def tensors_in(tree: Tree) -> list[Tensor]:
    """The tensors of ``tree``, in the order of :func:`map_tensors`."""
    return leaves_in(tree, is_tensor)


def layout_of(tree: Tree) -> Hashable:
    """A key that is equal for trees that differ in the contents of their tensors alone; None where
    ``tree`` holds something that is neither part of a tree, as :func:`map_leaves` says, nor a plain
    value."""
    try:
        return _layout(tree)
    except _OpaqueError:
        return None


def nodes_by_path(tree: Tree, is_leaf: Callable[[object], bool]) -> dict[str, object]:
    """Each node of ``tree`` that holds no others, by the path that leads to it in Python, such as
    ``.dense``, ``['user']`` or ``[0]``; also what is no part of a tree."""
    found: dict[str, object] = {}
    _note_paths(tree, "", is_leaf, found)
    return found


def _note_paths(
    tree: Tree, path: str, is_leaf: Callable[[object], bool], found: dict[str, object]
) -> None:
    if is_leaf(tree):
        found[path] = tree
        return
    found_parts = None if is_plain_value(tree) else _parts_of(tree)
    if isinstance(tree, (tuple, list)):
        names = getattr(type(tree), "_fields", None)
        steps = [f"[{n}]" for n in range(len(tree))] if names is None else [f".{n}" for n in names]
        parts = list(zip(steps, tree, strict=True))
    elif found_parts is not None:
        form = "[{!r}]" if isinstance(tree, Mapping) else ".{}"
        parts = [(form.format(key), part) for key, part in found_parts.items()]
    else:
        found[path] = tree
        return
    for name, part in parts:
        _note_paths(part, path + name, is_leaf, found)


class _OpaqueError(Exception):
    """Raised at a node that is no part of a tree."""


def _layout(tree: Tree) -> Hashable:
    kind = type(tree)
    if kind in _PLAIN:
        return kind, tree  # 1, 1.0 and True are equal, and give results of other dtypes
    if isinstance(tree, Tensor):
        return Tensor, tree.shape, tree.dtype
    if isinstance(tree, (tuple, list)):
        kinds = set(map(type, tree))
        if _PLAIN.issuperset(kinds):
            # Of one type as a rule, which is soon hashed and compared.
            return kind, kinds.pop() if len(kinds) == 1 else tuple(map(type, tree)), tuple(tree)
        return kind, tuple(map(_layout, tree))
    get_fields = _fields_of_library(kind)
    if get_fields is not None:
        return kind, tuple(map(_layout, get_fields(tree)))
    parts = _parts_of(tree, init_only=False)
    if parts is None:
        raise _OpaqueError
    return kind, tuple([(key, _layout(part)) for key, part in parts.items()])
