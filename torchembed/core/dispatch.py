"""Defining an operation: its schema, its fake, its reference and the kernel picked for each key.

The dispatcher is the only registry of kernels. A dispatch key holds one implementation, so the
choice is made here, once, at import: with no kernel for a key the reference runs.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchembed.core import environment

_library = torch.library.Library("torchembed", "DEF")


class PickedKernel(NamedTuple):
    """What an operation runs for one dispatch key, and why; the doctor prints it."""

    op: str
    key: str
    kernel: str
    reason: str


picked_kernels: list[PickedKernel] = []


class CudaKernel(NamedTuple):
    """A kernel of the C++ library for GPUs, beside an operation's Triton kernel."""

    launch: Callable[..., Any]
    """Takes the operation's arguments; NotImplemented for a call that it leaves to Triton."""
    covers: str
    """Which calls it takes, in words."""


def _launcher(path: str) -> Callable[..., Any]:
    """The function at ``module:name``, imported at its first call: importing Triton is slow."""
    module, name = path.split(":")

    def launch(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    launch.__name__ = name
    return launch


def _first_of(launch: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``launch``, and ``other`` where that does not take the call."""

    def launch_either(*args: Any, **kwargs: Any) -> Any:
        result = launch(*args, **kwargs)
        return other(*args, **kwargs) if result is NotImplemented else result

    return launch_either


Check = Callable[..., None]
"""Takes the operation's arguments, and raises where they do not fit."""


def _behind(kernel: Callable[..., Any], *checks: Check | None) -> Callable[..., Any]:
    """``kernel`` behind those of ``checks`` that there are, the last of them first."""
    for check in checks:
        if check is not None:
            kernel = _after(check, kernel)
    return kernel


def _after(check: Check, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def checked(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return checked


def _while_not_capturing(check: Check) -> Check:
    """``check``, left out where a CUDA graph is captured, since nothing can be read there."""

    def check_or_not(*args: Any) -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            check(*args)

    return check_or_not


def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    triton: str | None = None,
    cuda: CudaKernel | None = None,
    native: Callable[..., Any] | None = None,
    check: Check | None = None,
    check_contents: Check | None = None,
    native_missing: str = "it has no C++ kernel",
) -> Callable[..., Any]:
    """Define ``torchembed::<schema>`` and register its implementations.

    Args:
        schema: what follows ``torchembed::``, for example ``"f(Tensor x) -> Tensor"``.
        reference: eager torch, the specification; it runs wherever no kernel is picked.
        fake: shapes and dtypes of the results, for tracing.
        triton: ``"module:launcher"`` of the Triton kernel, for CUDA (and for the CPU under
            Triton's interpreter).
        cuda: what takes some of the Triton kernel's calls on a GPU.
        native: the C++ kernel for the CPU.
        check: of dtypes, shapes, devices and numbers, before every kernel and in tracing; it reads
            no tensor's contents.
        check_contents: of what tensors hold, before every kernel where
            ``TORCHEMBED_CHECK_OPERATIONS`` is set; it may wait for a GPU.
        native_missing: why ``native`` is None.

    Returns:
        The default overload, ready to call.
    """
    checks = [check]
    if check_contents is not None and environment.check_operations():
        # Contents are read of tensors whose shapes fit alone.
        checks.insert(0, _while_not_capturing(check_contents))
    name = _library.define(schema)
    _library.impl(name, _behind(reference, *checks), "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchembed::{name}", _behind(fake, check), lib=_library)

    def pick(key: str, kernel: str, reason: str, function: Callable[..., Any] | None) -> None:
        if function is not None:
            _library.impl(name, _behind(function, *checks), key)
        picked_kernels.append(PickedKernel(name, key, kernel, reason))

    if environment.force_reference():
        for key in ("CPU", "CUDA"):
            pick(key, "reference", "TORCHEMBED_FORCE_REFERENCE is set", None)
        return getattr(torch.ops.torchembed, name).default

    has_triton = _triton_is_installed()
    interpreted = triton is not None and environment.triton_interpreted()
    not_interpreted = "; TRITON_INTERPRET is set, but triton is not installed" * interpreted
    if triton is not None and interpreted and has_triton:
        pick("CPU", "triton", "TRITON_INTERPRET is set", _launcher(triton))
    elif native is not None:
        pick("CPU", "native", f"the C++ library is loaded{not_interpreted}", native)
    else:
        pick("CPU", "reference", f"{native_missing}{not_interpreted}", None)

    if triton is None:
        pick("CUDA", "reference", "it has no Triton kernel", None)
    elif not has_triton:
        pick("CUDA", "reference", "triton is not installed", None)
    elif cuda is None:
        pick("CUDA", "triton", "triton is installed", _launcher(triton))
    else:
        reason = f"triton is installed; the C++ library takes {cuda.covers}"
        pick("CUDA", "triton", reason, _first_of(cuda.launch, _launcher(triton)))
    return getattr(torch.ops.torchembed, name).default
