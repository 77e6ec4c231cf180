"""Values that the code of a model and of a loss function reads, and that no module holds: global
variables, closures, and attributes of classes and of other objects."""

import dis
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchembed.step.model_loss import BatchLoss

CONTAINERS = (list, dict, set, deque)
"""Types of values whose items are looked at."""
MAX_ITEMS = 32
"""Number of items that are looked at of each list, dict or set."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
_NAMESPACES = frozenset(("SimpleNamespace", "Namespace"))
_OWN = frozenset(("torchembed", "torchrec", "fbgemm_gpu"))
"""Packages whose values are left out, since steps follow them."""
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that are no code of the user's own."""
_MAX_FUNCTIONS = 256
_MAX_DEPTH = 3
"""Depth to which objects and dicts in others are looked at."""
_OF_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"))
_OF_VARIABLES = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))

Values = Mapping[Any, object]


class ReadValues(NamedTuple):
    """Some of the values of a mapping."""

    where: str
    """The mapping in warnings."""
    values: Values
    names: list[Any]


def values_read(
    modules: Mapping[str, nn.Module], forwards: Mapping[type, object], loss_fn: object
) -> list[ReadValues]:
    """The values that code reads, but those of the modules, and functions, classes and modules of
    Python that variables and classes hold.

    Args:
        modules: by their names in warnings.
        forwards: ``forward`` of their classes.
        loss_fn: of a pipeline.
    """
    code = _Code()
    users = {w: m for w, m in modules.items() if not type(m).__module__.startswith("torch.")}
    objects: dict[str, Values] = {where: vars(module) for where, module in users.items()}
    for kind in dict.fromkeys(map(type, users.values())):
        code.follow_kind(kind)
        code.read(forwards[kind])
    called = called_for_loss(loss_fn)
    if isinstance(called, types.MethodType):
        code.read(called.__func__)
        called, where = called.__self__, f"{type(called.__self__).__name__} of the loss function"
    else:
        code.read(called)
        code.read(inspect.getattr_static(type(called), "__call__", None))
        where = f"loss function {type(called).__name__}"
    if _is_object(called) or isinstance(called, nn.Module):
        code.follow_kind(type(called))
        objects.setdefault(where, vars(called))
    if isinstance(called, nn.Module):
        objects[f"the buffers of {where}"] = called._buffers
    if isinstance(loss_fn, functools.partial):
        code.note_values(f"the keywords of {where}", loss_fn.keywords)
    held = {id(vars(module)) for module in modules.values()}
    return [place for place in _places(code, objects) if id(place.values) not in held]


def called_for_loss(loss_fn: object) -> object:
    """The function, method or object that ``loss_fn`` of a pipeline calls."""
    while isinstance(loss_fn, (BatchLoss, functools.partial)):
        loss_fn = loss_fn.loss_fn if isinstance(loss_fn, BatchLoss) else loss_fn.func
    return loss_fn


def _places(code: "_Code", objects: dict[str, Values]) -> list[ReadValues]:
    """The places that ``code`` reads, of ``objects`` and of those within them."""
    dicts: dict[str, Values] = {}
    seen = set(map(id, objects.values()))

    def places() -> list[ReadValues]:
        found = [
            ReadValues(w, v, [n for n in v if n in code.attributes]) for w, v in objects.items()
        ]
        found += [ReadValues(w, v, [*islice(v, MAX_ITEMS)]) for w, v in dicts.items()]
        return [*found, *code.places()]

    for _ in range(_MAX_DEPTH):
        for where, values, names in places():
            for name in names:
                value = values.get(name)
                inner = value if type(value) is dict else vars(value) if _is_object(value) else None
                if inner is None or id(inner) in seen:
                    continue
                seen.add(id(inner))
                (dicts if inner is value else objects)[f"{name} of {where}"] = inner
                if inner is not value:
                    code.follow_kind(type(value))
    return places()


def _is_object(value: object) -> bool:
    """True for an object of a class of the user's own, and for a namespace, that is no module."""
    kind = type(value)
    if isinstance(value, (nn.Module, type, Tensor)) or not kind.__dictoffset__:
        return False
    return kind.__name__ in _NAMESPACES or not _is_of_library(kind)


def _is_of_library(of: type | types.FunctionType) -> bool:
    return _is_library((of.__module__ or "").partition(".")[0])


@functools.cache
def _is_library(package: str) -> bool:
    """True for packages that are not the user's own code."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = any(folder in file for folder in _INSTALLED)
    return package in sys.stdlib_module_names or package in _OWN or is_installed


class _Code:
    """The reads of functions, and of those that they call by their names.

    Attributes:
        attributes: names that are read or set as attributes, of whatever object.
    """

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self._variables: dict[int, ReadValues] = {}
        """For each module of Python, its global variables that are read."""
        self._values: list[ReadValues] = []
        """Values of functions: variables of the functions around them, defaults, attributes."""
        self._functions: set[types.FunctionType] = set()
        self._kinds: dict[type, None] = {}
        """Classes whose objects have attributes that are read, and their bases."""

    def places(self) -> list[ReadValues]:
        """The variables of modules, values of functions, and attributes of classes."""
        of_classes = [
            ReadValues(f"class {k.__name__}", vars(k), [n for n in vars(k) if n in self.attributes])
            for k in self._kinds
        ]
        # Functions that others call by their names change rarely, and are many.
        shared = [
            place._replace(
                names=[
                    n
                    for n in place.names
                    if not isinstance(place.values[n], (*_CODE, *_DESCRIPTORS))
                ]
            )
            for place in (*self._variables.values(), *of_classes)
        ]
        return [*shared, *self._values]

    def note_values(self, where: str, values: Values) -> None:
        """Note all of ``values``."""
        if values:
            self._values.append(ReadValues(where, values, [*values]))
            for value in values.values():
                self.follow(value)

    def follow_kind(self, kind: type) -> None:
        """Read the methods of ``kind`` that are named, by what is read from now on too."""
        for base in kind.__mro__:
            if base in self._kinds or _is_of_library(base):
                continue
            self._kinds[base] = None
            for name in self.attributes & vars(base).keys():
                self.follow(vars(base)[name])

    def follow(self, value: object) -> None:
        """Read ``value``, where it is a function, method or property of the user's own."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType) and not _is_of_library(value):
            self.read(value)

    def read(self, value: object) -> None:
        """Read ``value``, where it is a function."""
        if not isinstance(value, types.FunctionType) or value in self._functions:
            return
        if value.__module__.startswith("torch.") or len(self._functions) == _MAX_FUNCTIONS:
            return
        self._functions.add(value)
        attributes, variables = _names_in(value.__code__)
        self._read_variables(value, variables)
        new = attributes - self.attributes
        self.attributes |= new
        for kind in list(self._kinds):
            for name in new & vars(kind).keys():
                self.follow(vars(kind)[name])

    def _read_variables(self, function: types.FunctionType, names: frozenset[str]) -> None:
        values = function.__globals__
        where = f"the globals of {function.__module__}"
        known = self._variables.setdefault(id(values), ReadValues(where, values, []))
        known.names.extend(name for name in names if name in values and name not in known.names)
        for name in names:
            self.follow(values.get(name))
        of_function = function.__qualname__
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.note_values(f"the closure of {of_function}", _Cells(cells))
        self.note_values(f"function {of_function}", vars(function))
        defaults, arguments = function.__defaults__ or (), function.__code__.co_argcount
        of_defaults = function.__code__.co_varnames[arguments - len(defaults) : arguments]
        for by_name in (dict(zip(of_defaults, defaults, strict=True)), function.__kwdefaults__):
            self.note_values(f"the defaults of {of_function}", by_name or {})


class _Cells(Mapping[str, object]):
    """Variables of the functions around a function."""

    def __init__(self, cells: dict[str, types.CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> object:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it is not set
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        empty = types.CellType()
        return (name for name, cell in self._cells.items() if cell != empty)

    def __len__(self) -> int:
        return len(list(iter(self)))


@functools.cache
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that ``code`` reads or sets, and the global variables that it reads."""
    attributes, variables = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OF_ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname in _OF_VARIABLES:
            variables.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # of lambdas and comprehensions
            of_inner = _names_in(constant)
            attributes |= of_inner[0]
            variables |= of_inner[1]
    return frozenset(attributes), frozenset(variables)
