"""Lines of a model's source, for messages about what it computes there."""

import inspect
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

_LIBRARY = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<number>\d+), in .*\n\s*(?P<code>.*)')


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    number: int
    code: str


class SourceLines:
    """Finds the line of a model that an error or an operation comes from."""

    def __init__(self, model: nn.Module) -> None:
        found = {_source_file(type(module)) for module in model.modules()}
        files = {file for file in found if file is not None and not file.startswith(_TORCH)}
        # The caller's own files first: a layer of this library fails for how it is called.
        self._files: Sequence[set[str]] = (
            {file for file in files if not file.startswith(_LIBRARY)},
            {file for file in files if file.startswith(_LIBRARY)},
        )

    def of_error(self, error: BaseException) -> str:
        """The place where ``error`` was raised, as ``", at <file>, line <n>: <code>"``; empty where
        that is not in the model."""
        frames = traceback.extract_tb(error.__traceback__)
        return self.of_lines(SourceLine(f.filename, f.lineno or 0, f.line or "") for f in frames)

    def of_trace(self, trace: str | None) -> str:
        """The same for an operation, by the ``stack_trace`` that torch.export kept of it."""
        frames = _FRAME.finditer(trace or "")
        return self.of_lines(
            SourceLine(f["file"], int(f["number"]), f["code"].strip()) for f in frames
        )

    def of_lines(self, lines: Iterable[SourceLine]) -> str:
        """The same for the lines of a stack, the innermost last."""
        inner_first = list(lines)[::-1]
        for files in self._files:
            for line in inner_first:
                if line.file in files:
                    return f", at {line.file}, line {line.number}: {line.code}"
        return ""


def _source_file(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except TypeError:
        # Classes of C++, and those that were made in an interactive session.
        return None
