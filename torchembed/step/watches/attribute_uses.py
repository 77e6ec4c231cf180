"""Attributes of modules that steps read or set: a graph depends on what its capture has read, and
computes what its capture has set."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchembed.core.trees import Tree, layout_of, map_tensors, tensors_in
from torchembed.step.stages import Reason
from torchembed.step.watches.watched_values import OF_EVERY_MODULE, NotCapturable, WatchedValues

_HOLDERS = ("__dict__", "_buffers")
"""Attributes that hold others."""
_CODE_OF_MODULES = frozenset(
    method.__code__
    for method in (nn.Module.__getattr__, nn.Module.__setattr__, nn.Module.register_buffer)
)
"""The code that reads the holders for one attribute alone."""


class LeftAttribute(NamedTuple):
    """An attribute that a captured step has set."""

    holder: dict[str, Any]
    """Attributes or buffers of a module."""
    name: str
    value: Tree
    """With tensors in the graph's memory, or of the batch."""

    def put(self) -> None:
        """Set it to a copy of what the last replay has computed."""
        self.holder[self.name] = map_tensors(torch.clone, self.value)


class _Uses:
    """The uses of a module's attributes in a step.

    Attributes:
        read: names of attributes that were read before they were set.
        written: names of attributes that were set.
        reads_all: whether any attribute may have been read.
    """

    def __init__(self) -> None:
        self.read, self.written = set[str](), set[str]()
        self.reads_all = False

    def note_read(self, name: str, reader: FrameType) -> None:
        """Note that ``reader`` reads the attribute called ``name``."""
        if name in _HOLDERS and reader.f_code not in _CODE_OF_MODULES:
            self.reads_all = True
        if name not in self.written:
            self.read.add(name)


class ObservedStep:
    """The uses of attributes in a step.

    Attributes:
        uses: those of each module; None where they are not known.
    """

    def __init__(self) -> None:
        self.uses: dict[nn.Module, _Uses] | None = None

    @property
    def read(self) -> Mapping[nn.Module, set[str] | None] | None:
        """The attributes that the step depends on; None for all of a module, or of all modules."""
        if self.uses is None:
            return None
        return {m: None if uses.reads_all else uses.read for m, uses in self.uses.items()}


class AttributeUses:
    """Observes which attributes of users' modules steps read and set.

    Their classes are given methods that note it, for the time of a step that is not replayed. Where
    torch compiles code, which it would do anew for such classes, nothing is observed, and all
    attributes count as read.

    Args:
        values: is told which attributes steps depend on.
    """

    def __init__(self, values: WatchedValues) -> None:
        self._values = values
        self._has_begun = False

    @contextlib.contextmanager
    def observed(self) -> Iterator[ObservedStep]:
        """A context for a step. The first one is left out, since it may compile code."""
        step = ObservedStep()
        if not self._has_begun:
            self._has_begun = True
            yield step
            return
        if _has_compiled():
            yield step
        else:
            step.uses = {module: _Uses() for module in self._values.users_modules().values()}
            with _noting(step.uses):
                yield step
        self._values.note_reads(step.read)

    def left_by(self, step: ObservedStep) -> list[LeftAttribute]:
        """The attributes that ``step``, a capture, has set and not read before; none where they are
        not known.

        Raises:
            NotCapturable: for a value that cannot be copied.
        """
        left: list[LeftAttribute] = []
        uses = step.uses or {}
        for where, module in self._values.users_modules().items():
            # What is read first is looked at, and was the same object in the steps before.
            of_module = uses.get(module, _Uses())
            for name in sorted(of_module.written - of_module.read):
                holder = next((h for h in (vars(module), module._buffers) if name in h), None)
                if holder is None or name in OF_EVERY_MODULE:
                    continue  # it is gone again, or a parameter or a module
                value = holder[name]
                if layout_of(value) is None:
                    what = "forward sets it, which no graph does; set tensors or numbers"
                    raise NotCapturable(Reason(what, f"{name} of {where}"))
                if any(tensor.retains_grad for tensor in tensors_in(value)):
                    what = "forward has it retain its gradient, which no graph leaves there"
                    raise NotCapturable(Reason(what, f"{name} of {where}"))
                left.append(LeftAttribute(holder, name, map_tensors(Tensor.detach, value)))
        return left


def _has_compiled() -> bool:
    """True if torch has compiled code in this process."""
    # Not imported for this: it takes seconds.
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is not None and bool(compiler.counters.get("frames"))


@contextlib.contextmanager
def _noting(uses: Mapping[nn.Module, _Uses]) -> Iterator[None]:
    """Within it the classes of the modules of ``uses`` note there how attributes are used."""
    by_id = {id(module): of_module for module, of_module in uses.items()}
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(map(type, uses)):
            stack.enter_context(_notes(kind, by_id))
        yield


@contextlib.contextmanager
def _notes(kind: type[nn.Module], by_id: Mapping[int, _Uses]) -> Iterator[None]:
    get, put = kind.__getattribute__, kind.__setattr__

    def noting_get(module: nn.Module, name: str) -> object:
        uses = by_id.get(id(module))
        if uses is not None:
            uses.note_read(name, sys._getframe(1))
        return get(module, name)

    def noting_put(module: nn.Module, name: str, value: Any) -> None:
        uses = by_id.get(id(module))
        if uses is not None:
            uses.written.add(name)
        put(module, name, value)

    noting = {"__getattribute__": noting_get, "__setattr__": noting_put}
    own = {name: vars(kind)[name] for name in noting if name in vars(kind)}
    for name, method in noting.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for name in noting:
            if name in own:
                setattr(kind, name, own[name])
            else:
                delattr(kind, name)
