"""Sections of HugeCTR's configuration: keys are taken one by one, and what is left is refused."""

from collections.abc import Mapping
from typing import Any

from torchembed.serving.configuration.fields import (
    Limit,
    check_limit,
    check_value,
    hidden,
    nearest,
)

_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class Section:
    """The keys of a mapping in the file, each of which is to be taken.

    Numbers and truths may stand there as strings, which HugeCTR's own samples have.

    Args:
        values: of the file.
        path: of ``values`` there, for errors.
        left_out: takes a sentence for each key that has no effect here.
    """

    def __init__(self, values: Any, path: str, left_out: list[str]) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{path or 'the file'} must be an object of keys, got {values!r}")
        self._values = dict(values)
        self._known = set()
        self.path = path
        self._left_out = left_out

    def path_of(self, key: str) -> str:
        """The path of a key in the file."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """True where the file has the key, taken or not."""
        return key in self._values

    def take(self, key: str, kind: type, default: Any, limit: Limit | None = None) -> Any:
        """The value of a key of the type ``kind``, ``default`` where the file lacks it.

        Raises:
            ValueError: for a value of another type, or one that ``limit`` does not allow.
        """
        self._known.add(key)
        if key not in self._values:
            return default
        return _value(self.path_of(key), self._values[key], kind, limit)

    def take_secret(self, key: str, default: str) -> str:
        """As :meth:`take`, of a string that errors do not show."""
        try:
            return self.take(key, str, default)
        except ValueError as error:
            raise ValueError(hidden(str(error))) from None

    def take_list(self, key: str, kind: type, limit: Limit | None = None) -> list[Any] | None:
        """The values of a list, each of the type ``kind``; None where the file lacks it."""
        self._known.add(key)
        if key not in self._values:
            return None
        values = self._values[key]
        if not isinstance(values, list):
            raise ValueError(f"{self.path_of(key)} must be a list, got {values!r}")
        return [
            _value(f"{self.path_of(key)}[{i}]", value, kind, limit)
            for i, value in enumerate(values)
        ]

    def take_any(self, key: str) -> Any:
        """The value of a key as it stands there; None where the file lacks it."""
        self._known.add(key)
        return self._values.get(key)

    def take_object(self, key: str) -> Any:
        """The value of a key for a section of its own; one without keys where the file lacks it."""
        value = self.take_any(key)
        return {} if value is None else value

    def leave_out(self, key: str, why: str) -> None:
        """Take a key that has no effect here, and say so."""
        self._known.add(key)
        if key in self._values:
            self.note(key, why)

    def note(self, key: str, why: str) -> None:
        """Say of a key how far it is honoured."""
        self._left_out.append(f"{self.path_of(key)}: {why}")

    def end(self) -> None:
        """Raise ``ValueError`` where keys have not been taken, which HugeCTR does not know."""
        for key in self._values:
            if key not in self._known:
                raise ValueError(
                    f"{self.path_of(key)} is no key of HugeCTR{nearest(key, self._known)}; mend or "
                    "remove it"
                )


def _value(path: str, value: Any, kind: type, limit: Limit | None) -> Any:
    if isinstance(value, str) and kind is bool:
        value = _TRUTHS.get(value.lower(), value)
    elif isinstance(value, str) and kind in (int, float):
        try:
            value = kind(value)
        except ValueError:
            raise ValueError(f"{path} must be a number, got {value!r}") from None
    check_value(path, value, kind)
    if kind is float:
        value = float(value)
    check_limit(path, value, limit)
    return value
