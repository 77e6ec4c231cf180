"""The modules of a model that are called from Python, where hooks see them."""

import sys
from collections.abc import Iterator

import torch
from torch import nn


def called_from_python(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` whose hooks are called, with their names. Compiled ones would be
    compiled anew for a hook within them, so that what is in those is left out."""
    # Not imported for this: it takes seconds.
    wrappers = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in compiled):
            continue
        if isinstance(module, wrappers) or module._compiled_call_impl is not None:
            compiled.append(f"{name}." if name else "")
        elif not isinstance(module, torch.jit.ScriptModule):
            yield name, module
