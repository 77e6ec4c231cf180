"""Loads the C++ library ``_C.abi3.so`` once, and says why where it could not.

Its operations live in the private namespace ``torchembed_native``; the rooms under ``ops/`` pick
them for the CPU, and for some calls on GPUs.
"""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchembed.core import environment
from torchembed.core.dispatch import CudaKernel

LIBRARY = Path(__file__).parent / "_C.abi3.so"


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
        f"torchembed runs its slower reference operations on the CPU: {reason}; "
        "run `pip install .` with a C++ compiler, then `python -m torchembed.doctor`",
        stacklevel=2,
    )
    return reason


def native_op(name: str) -> Callable[..., Any] | None:
    """The C++ kernel ``torchembed_native::<name>``, or None where the library is not loaded.

    Raises:
        ImportError: where the library was built from other sources and lacks ``name``.
    """
    if load_error() is not None:
        return None
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


def missing_reason() -> str:
    """Why ``native_op`` gives None, in words."""
    return load_error() or "it has no C++ kernel"
