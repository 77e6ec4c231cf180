"""Configurations from the plain values of a file, and back to these."""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from torchembed.serving.configuration.fields import (
    check_field,
    field_hints,
    nearest,
    without_limit,
    without_none,
)

Config = TypeVar("Config")


def config_from_values(config_type: type[Config], values: Any, path: str = "") -> Config:
    """The dataclass ``config_type`` of the plain values of a file.

    Args:
        values: a mapping by field; nested ones are mappings too, enums their values, and tuples
            lists.
        path: of ``values`` in the file, for errors.

    Raises:
        ValueError: for keys that are unknown or missing, and for values that the dataclass or its
            annotations refuse; it names the key's path.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path or 'the file'} must be a mapping of keys, got {values!r}")
    hints = field_hints(config_type)
    fields = {field.name: field for field in dataclasses.fields(config_type)}  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in fields:
            raise ValueError(
                f"{_join(path, str(key))} is unknown{nearest(str(key), fields)} (known here: "
                f"{', '.join(fields)})"
            )
    for name, field in fields.items():
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if name not in values and not has_default:
            raise ValueError(f"{_join(path, name)} is missing; it has no default")
    arguments = {key: _convert(values[key], hints[key], _join(path, key)) for key in values}
    for key, argument in arguments.items():
        check_field(fields[key], _join(path, key), argument, hints[key])
    try:
        return config_type(**arguments)
    except (ValueError, TypeError) as error:
        raise ValueError(_with_path(str(error), path, fields)) from error


def values_of(config: Any) -> Any:
    """The plain values of ``config`` for a file, without fields that have their defaults: what
    :func:`config_from_values` takes."""
    if dataclasses.is_dataclass(config):
        return {
            field.name: values_of(getattr(config, field.name))
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != _default(field)
        }
    if isinstance(config, Mapping):
        return {key: values_of(value) for key, value in config.items()}
    if isinstance(config, tuple):
        return [values_of(value) for value in config]
    if isinstance(config, enum.Enum):
        return config.value
    return str(config) if isinstance(config, Path) else config


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as a field of ``hint``; what cannot be converted stays, for its check."""
    hint, is_optional = without_none(hint)
    if value is None and is_optional:
        return None
    hint, _ = without_limit(hint)
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(v, get_args(hint)[0], f"{path}[{i}]") for i, v in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        member = get_args(hint)[1]
        return {key: _convert(v, member, _join(path, str(key))) for key, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return config_from_values(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint, value, path)
    if hint is Path and isinstance(value, str):
        return Path(value)
    return value


def _member(enum_type: type[enum.Enum], value: Any, path: str) -> enum.Enum:
    values = [member.value for member in enum_type]
    if value not in values:
        hint = nearest(value, values) if isinstance(value, str) else ""
        raise ValueError(f"{path} must be one of {', '.join(values)}, got {value!r}{hint}")
    return enum_type(value)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _with_path(message: str, path: str, fields: Mapping[str, Any]) -> str:
    """``message`` with ``path`` before the field that it begins with, or before all of it."""
    if not path:
        return message
    begins_with_field = any(message.startswith((f"{n} ", f"{n}.", f"{n}[")) for n in fields)
    return f"{path}.{message}" if begins_with_field else f"{path}: {message}"
