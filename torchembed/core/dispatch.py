"""Defining an operation: its schema, its fake, its reference and the kernel picked for each key.

The dispatcher is the only registry of kernels. A dispatch key holds one implementation, so the
choice is made here, once, at import: with no kernel for a key the reference runs.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from torchembed.core import environment

Kernel: TypeAlias = Callable[..., Any]
"""Takes an operation's arguments, or its record of them, and returns its results. The dispatcher
calls all operations alike, so their signatures are not in the type."""
Check: TypeAlias = Callable[..., None]
"""Takes what a :data:`Kernel` takes, and raises where it does not fit."""

_library = torch.library.Library("torchembed", "DEF")


class PickedKernel(NamedTuple):
    """Kernel that an operation runs for one dispatch key, and why; the doctor prints it."""

    op: str
    key: str
    kernel: str
    reason: str


picked_kernels: list[PickedKernel] = []
references: dict[Kernel, Kernel] = {}
"""The reference of each operation, as a function of its arguments: what it is made of in programs
that are to run without torchembed."""


class CudaKernel(NamedTuple):
    """Kernel of the C++ library for GPUs, which takes some calls in place of the Triton kernel."""

    launch: Kernel
    """Returns NotImplemented for a call that it leaves to Triton."""
    covers: str
    """The calls that it takes, in words."""


def _launcher(path: str) -> Kernel:
    """The function at ``module:name``, imported at its first call: importing Triton is slow."""
    module, name = path.split(":")

    @functools.cache
    def launcher() -> Kernel:
        return getattr(importlib.import_module(module), name)

    def launch(*args: object) -> object:
        return launcher()(*args)

    launch.__name__ = name
    return launch


def _with_fallback(launch: Kernel, fallback: Kernel) -> Kernel:
    """``launch``, and ``fallback`` for the calls that it answers by NotImplemented."""

    def launch_either(*args: object) -> object:
        result = launch(*args)
        return fallback(*args) if result is NotImplemented else result

    return launch_either


def _checked(kernel: Kernel, *checks: Check | None) -> Kernel:
    """``kernel`` that runs after the given ``checks``, the last of which runs first."""
    for check in checks:
        if check is not None:
            kernel = _after(check, kernel)
    return kernel


def _after(check: Check, kernel: Kernel) -> Kernel:
    @functools.wraps(kernel)
    def checked(*args: object) -> object:
        check(*args)
        return kernel(*args)

    return checked


def _skipped_in_capture(check: Check) -> Check:
    """``check``, left out while a CUDA graph is captured, since nothing can be read there."""

    def check_or_not(*args: object) -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            check(*args)

    return check_or_not


def _given_record(kernel: Kernel, record: Kernel | None) -> Kernel:
    """``kernel``, which takes one ``record``, as a function of the record's fields."""
    if record is None:
        return kernel

    @functools.wraps(kernel)
    def launch(*args: object) -> object:
        return kernel(record(*args))

    return launch


def _given_fields(kernel: Kernel) -> Kernel:
    """``kernel``, which takes arguments one by one, as a function of one record of them."""

    @functools.wraps(kernel)
    def launch(arguments: tuple[object, ...]) -> object:
        return kernel(*arguments)

    return launch


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def define_op(
    schema: str,
    *,
    reference: Kernel,
    fake: Kernel,
    triton: str | None = None,
    cuda: CudaKernel | None = None,
    native: Kernel | str = "it has no C++ kernel",
    check: Check | None = None,
    check_contents: Check | None = None,
    record: Kernel | None = None,
) -> Kernel:
    """Define ``torchembed::<schema>`` and register its implementations.

    Args:
        schema: the part after ``torchembed::``, for example ``"f(Tensor x) -> Tensor"``.
        reference: the specification, in eager torch; it runs wherever no kernel is picked.
        fake: makes results of the right shapes and dtypes, for tracing.
        triton: ``"module:launcher"`` of the Triton kernel, for CUDA (and for the CPU under
            Triton's interpreter).
        cuda: kernel that takes some of the Triton kernel's calls on a GPU.
        native: the C++ kernel for the CPU, or why there is none.
        check: checks dtypes, shapes, devices and numbers before every kernel and in tracing; it
            reads no tensor's contents.
        check_contents: checks what tensors hold, before every kernel where
            ``TORCHEMBED_CHECK_OPERATIONS`` is set; it may wait for a GPU.
        record: makes one record of the operation's arguments, which all of the above then take in
            their place, but for ``native``.

    Returns:
        The default overload, ready to call.
    """
    checks = [check]
    if check_contents is not None and environment.check_operations():
        # First in the list, so it runs last: contents are read only of tensors whose shapes fit.
        checks.insert(0, _skipped_in_capture(check_contents))
    name = _library.define(schema)

    def implementation(kernel: Kernel, *checks: Check | None) -> Kernel:
        return _given_record(_checked(kernel, *checks), record)

    _library.impl(name, implementation(reference, *checks), "CompositeExplicitAutograd")
    op = getattr(torch.ops.torchembed, name).default
    references[op] = implementation(reference)
    torch.library.register_fake(f"torchembed::{name}", implementation(fake, check), lib=_library)

    def pick(key: str, kernel: str, reason: str, function: Kernel | None) -> None:
        if function is not None:
            _library.impl(name, implementation(function, *checks), key)
        picked_kernels.append(PickedKernel(name, key, kernel, reason))

    if environment.force_reference():
        for key in ("CPU", "CUDA"):
            pick(key, "reference", "TORCHEMBED_FORCE_REFERENCE is set", None)
        return op

    has_triton = _triton_is_installed()
    interpreted = triton is not None and environment.triton_interpreted()
    not_interpreted = "; TRITON_INTERPRET is set, but triton is not installed" * interpreted
    if triton is not None and interpreted and has_triton:
        pick("CPU", "triton", "TRITON_INTERPRET is set", _launcher(triton))
    elif isinstance(native, str):
        pick("CPU", "reference", f"{native}{not_interpreted}", None)
    else:
        flat = native if record is None else _given_fields(native)
        pick("CPU", "native", f"the C++ library is loaded{not_interpreted}", flat)

    if triton is None:
        pick("CUDA", "reference", "it has no Triton kernel", None)
    elif not has_triton:
        pick("CUDA", "reference", "triton is not installed", None)
    elif cuda is None:
        pick("CUDA", "triton", "triton is installed", _launcher(triton))
    else:
        reason = f"triton is installed; the C++ library takes {cuda.covers}"
        pick("CUDA", "triton", reason, _with_fallback(cuda.launch, _launcher(triton)))
    return op
