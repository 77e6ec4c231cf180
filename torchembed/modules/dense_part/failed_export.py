"""The line of a model that torch.export does not take."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._logging.structured import INTERN_TABLE
from torch.export import Dim
from torch.utils._pytree import tree_map

from torchembed.modules.dense_part.source_lines import SourceLine, SourceLines


def line_of_failure(
    error: Exception,
    model: nn.Module,
    part: nn.Module,
    arguments: tuple[Any, ...],
    others: tuple[Any, ...],
    shapes: Any,
) -> str:
    """The place in ``model`` of the code that torch.export refused, as :class:`SourceLines` says
    it.

    Args:
        error: what torch.export raised for ``part``, which runs ``model``.
        arguments: the examples of ``part``.
        others: arguments of another number of samples.
        shapes: the dynamic shapes of ``arguments``.
    """
    lines = SourceLines(model)
    line = lines.of_error(error)
    if line:
        return line
    # torch.export only says then that the number of samples must be that of the examples. Code that
    # depends on it raises where it is run with another one,
    try:
        part(*others)
    except Exception as other:  # noqa: BLE001 - any error of the model tells the line
        return lines.of_error(other)
    # or it branches.
    found = (lines.of_lines(trace) for trace in _branches(part, arguments, shapes))
    return next(filter(None, found), "")


class _GuardStacks(logging.Handler):
    """Keeps the stacks of the guards on sizes in torch's structured log."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[list[dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        added = getattr(record, "metadata", {}).get("guard_added_fast")
        if added is not None:
            self.stacks.append(added["stack"])


def _branches(
    part: nn.Module, arguments: tuple[Any, ...], shapes: Any
) -> Iterator[list[SourceLine]]:
    """The stacks where a trace of ``part`` asked for a size that is to be any."""
    any_size = tree_map(
        lambda size: Dim.AUTO if isinstance(size, Dim) else size,
        shapes,
        is_leaf=lambda size: isinstance(size, Dim),
    )
    log, handler = logging.getLogger("torch.__trace"), _GuardStacks()
    log.addHandler(handler)
    try:
        torch.export.export(part, arguments, dynamic_shapes=any_size)
    except Exception:  # noqa: BLE001 - the error that the caller has is the one to show
        return
    finally:
        log.removeHandler(handler)
    files = {number: file for file, number in INTERN_TABLE.items()}
    for stack in handler.stacks:
        yield [
            SourceLine(files.get(frame["filename"], ""), frame["line"], frame.get("loc") or "")
            for frame in stack
        ]
