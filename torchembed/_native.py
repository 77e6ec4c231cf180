"""Loads the C++ library ``_C.abi3.so`` once, and says why where it could not.

Its operations live in the private namespace ``torchembed_native``; the rooms under ``ops/`` pick
them for the CPU, and for some calls on GPUs.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchembed.core import environment
from torchembed.core.dispatch import CudaKernel

PACKAGE = Path(__file__).parent
LIBRARY = environment.native_library() or PACKAGE / "_C.abi3.so"


@functools.cache
def load_error() -> str | None:
    """None where the library is loaded, else why not in one sentence. The first call loads it."""
    if environment.force_reference():
        return "TORCHEMBED_FORCE_REFERENCE is set"
    if not LIBRARY.exists():
        reason = f"the C++ library {LIBRARY.name} is not built"
    else:
        try:
            torch.ops.load_library(str(LIBRARY))
            return None
        except OSError as error:
            reason = f"the C++ library {LIBRARY.name} does not load: {error}"
    warnings.warn(
        f"torchembed runs its slower reference operations on the CPU: {reason}; {advice()}",
        stacklevel=2,
    )
    return reason


def advice() -> str:
    """The path that was imported, and what to do where its library is missing or does not load."""
    then = "then `python -m torchembed.doctor`"
    folder = PACKAGE.parent
    if not (folder / "setup.py").exists():
        return f"install torchembed again where there is a C++ compiler, {then}"
    installed = _installed_with_library()
    if installed is None:
        return (
            f"torchembed is imported from the checkout at {folder}; run `make native "
            f"PYTHON=python3` in it, or `pip install .` in it and Python in another folder, {then}"
        )
    return (
        f"torchembed is imported from the checkout at {folder}, and not from {installed}, where "
        "one is installed with its library; run Python in another folder, or `make native "
        f"PYTHON=python3` in the checkout, {then}"
    )


def _installed_with_library() -> Path | None:
    """The first other torchembed on Python's path that has a library."""
    packages = (Path(entry, PACKAGE.name) for entry in sys.path)
    others = (package for package in packages if package.resolve() != PACKAGE.resolve())
    return next((package for package in others if (package / LIBRARY.name).exists()), None)


def native_op(name: str) -> Callable[..., Any] | str:
    """The C++ kernel ``torchembed_native::<name>``, or why the library is not loaded.

    Raises:
        ImportError: where the library was built from other sources and lacks ``name``.
    """
    error = load_error()
    if error is not None:
        return error
    kernel = getattr(torch.ops.torchembed_native, name, None)
    if kernel is None:
        raise ImportError(
            f"the C++ library {LIBRARY} has no kernel {name}, so it was built from other sources; "
            "build it again with `pip install .` or `make native`"
        )
    return kernel.default


def cuda_kernel(name: str, launch: Callable[..., Any], covers: str) -> CudaKernel | None:
    """``launch`` of ``torchembed_native::<name>`` for the calls that it ``covers``, or None where
    the library is not loaded or was built without CUDA."""
    if load_error() is not None or not hasattr(torch.ops.torchembed_native, name):
        return None
    return CudaKernel(launch, covers)
