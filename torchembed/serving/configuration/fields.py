"""Checks of the fields of configurations by their annotations."""

import dataclasses
import difflib
import enum
import math
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints


class Limit(Protocol):
    """A condition on a number, as metadata of ``Annotated``."""

    def allows(self, value: float) -> bool: ...

    def __str__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Numbers from ``least`` up."""

    least: float

    def allows(self, value: float) -> bool:
        return value >= self.least

    def __str__(self) -> str:
        return f"at least {self.least}"


@dataclasses.dataclass(frozen=True)
class Between:
    """Numbers from ``least`` to ``most``, both included."""

    least: float
    most: float

    def allows(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"from {self.least} to {self.most}"


@dataclasses.dataclass(frozen=True)
class Inside:
    """Numbers above ``low`` and below ``high``."""

    low: float
    high: float

    def allows(self, value: float) -> bool:
        return self.low < value < self.high

    def __str__(self) -> str:
        return f"above {self.low} and below {self.high}"


@dataclasses.dataclass(frozen=True)
class AboveUpTo:
    """Numbers above ``bound``, up to ``most``."""

    bound: float
    most: float = math.inf

    def allows(self, value: float) -> bool:
        return self.bound < value <= self.most

    def __str__(self) -> str:
        return f"above {self.bound}" + ("" if self.most == math.inf else f", at most {self.most}")


def check_fields(config: Any) -> None:
    """Raise ``ValueError`` where a field of the dataclass ``config`` is not what its annotation
    says: type, members and limits. Errors begin with the field's name."""
    hints = field_hints(type(config))
    for field in dataclasses.fields(config):
        check_field(field, field.name, getattr(config, field.name), hints[field.name])


def check_field(field: dataclasses.Field[Any], name: str, value: Any, hint: Any) -> None:
    """As :func:`check_value`; the values of secrets, which are no part of a ``repr``, are not shown
    in errors either."""
    try:
        check_value(name, value, hint)
    except ValueError as error:
        if field.repr:
            raise
        raise ValueError(hidden(str(error))) from None


def hidden(message: str) -> str:
    """The message of an error without the value that came."""
    return f"{message.partition(', got ')[0]}, got another, which is not shown"


def field_hints(config_type: type) -> dict[str, Any]:
    """The annotations of a dataclass by field, with their metadata."""
    return get_type_hints(config_type, include_extras=True)


def without_none(hint: Any) -> tuple[Any, bool]:
    """``hint`` without ``| None``, and whether it had that."""
    if get_origin(hint) in (Union, types.UnionType):
        others = tuple(arg for arg in get_args(hint) if arg is not types.NoneType)
        assert len(others) == 1, f"a field has one type besides None, got {hint}"
        return others[0], True
    return hint, False


def without_limit(hint: Any) -> tuple[Any, Limit | None]:
    """``hint`` without ``Annotated``, and the limit there."""
    if get_origin(hint) is Annotated:
        plain, limit = get_args(hint)
        return plain, limit
    return hint, None


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean <the name that is most like it>?``, or nothing where none is."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ``ValueError`` where ``value`` is not what the annotation ``hint`` says."""
    hint, is_optional = without_none(hint)
    if value is not None or not is_optional:
        _check_present(name, value, hint)


def _check_present(name: str, value: Any, hint: Any) -> None:
    hint, limit = without_limit(hint)
    origin = get_origin(hint)
    if origin is tuple:
        _expect(isinstance(value, tuple), name, "a list", value)
        for i, member in enumerate(value):
            check_value(f"{name}[{i}]", member, get_args(hint)[0])
    elif origin is Mapping:
        _expect(isinstance(value, Mapping), name, "a mapping of keys", value)
        for key, member in value.items():
            _expect(isinstance(key, str), f"each key of {name}", "a string", key)
            check_value(f"{name}.{key}", member, get_args(hint)[1])
    elif hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _expect(is_number and _is_finite(value), name, "a number", value)
    elif hint is int:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        _expect(is_number, name, "a whole number", value)
    else:
        _expect(isinstance(value, hint), name, _type_name(hint), value)
    check_limit(name, value, limit)


def check_limit(name: str, value: Any, limit: Limit | None) -> None:
    """Raise ``ValueError`` for a number that ``limit`` does not allow."""
    if limit is not None:
        _expect(limit.allows(value), name, str(limit), value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an integer that no float can be
        return False


def _expect(is_right: bool, name: str, wanted: str, value: Any) -> None:
    if not is_right:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _type_name(hint: type) -> str:
    if issubclass(hint, enum.Enum):
        return f"a {hint.__name__}"
    return {bool: "true or false", str: "a string", Path: "a path"}.get(hint, f"of {hint.__name__}")
