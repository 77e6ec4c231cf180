"""Defining an operation that a program of ``torch.compile`` or ``torch.export`` calls, which takes
one record of its arguments."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

_Record = TypeVar("_Record")
_Result = TypeVar("_Result")


def define_program_op(
    schema: str,
    record: Callable[..., _Record],
    run: Callable[[_Record], _Result],
    fake: Callable[[_Record], _Result],
    *,
    mutates_args: Iterable[str] = (),
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., _Result]:
    """Define ``torchembed::<schema>`` and return it.

    Args:
        schema: the part after ``torchembed::``, as of :func:`~torchembed.core.dispatch.define_op`.
        record: makes one record of the operation's arguments.
        run: does what the operation does, on every device.
        fake: makes results of the right shapes and dtypes, for tracing.
        mutates_args: names of arguments that ``run`` writes to.
        tags: of the operation.
    """
    name, signature = schema.split("(", 1)

    def run_arguments(*arguments: Any) -> _Result:
        return run(record(*arguments))

    op = torch.library.custom_op(
        f"torchembed::{name}",
        run_arguments,
        mutates_args=mutates_args,
        schema=f"({signature}",
        tags=tags,
    )
    op.register_fake(lambda *arguments: fake(record(*arguments)))
    return op
