"""``torch.compile`` of whole functions, once for all sizes."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compiled_once(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` compiled without graph breaks; any call after the first that would compile it
    again, for another size say, is an error."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    stance = "default"

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal stance
        with torch.compiler.set_stance(stance):
            result = compiled(*args, **kwargs)
        stance = "fail_on_recompile"
        return result

    return call
