"""Protocol buffers' text form, as Triton's config.pbtxt has it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Symbol:
    """A name of an enumeration, which stands without quotes."""

    name: str


Message: TypeAlias = Mapping[str, Any]
"""Values by field: strings, integers, booleans, symbols, messages, or a sequence of one of these
for a repeated field."""


def text_form(message: Message, indent: str = "") -> str:
    """The message's fields, each on lines of its own, in the order of ``message``."""
    return "".join(_field(name, value, indent) for name, value in message.items())


def _field(name: str, value: Any, indent: str) -> str:
    if isinstance(value, Mapping):
        return f"{indent}{name} {{\n{text_form(value, indent + '  ')}{indent}}}\n"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "".join(_field(name, element, indent) for element in value)
    return f"{indent}{name}: {_scalar(value)}\n"


def _scalar(value: str | int | bool | Symbol) -> str:
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, str):
        return '"' + "".join(_character(byte) for byte in value.encode()) + '"'
    return json.dumps(value)


def _character(byte: int) -> str:
    if byte in b'"\\':
        return "\\" + chr(byte)
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"
