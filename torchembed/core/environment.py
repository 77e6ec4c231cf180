"""The environment variables that torchembed reads, each in one function."""

import os
from pathlib import Path


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "no")


def force_reference() -> bool:
    """True where every operation must run its reference (``TORCHEMBED_FORCE_REFERENCE=1``)."""
    return _is_on("TORCHEMBED_FORCE_REFERENCE")


def triton_interpreted() -> bool:
    """True where Triton's interpreter runs its kernels, on the CPU too (``TRITON_INTERPRET=1``)."""
    return _is_on("TRITON_INTERPRET")


def check_operations() -> bool:
    """True where every operation must also check the contents of its arguments, which costs a pass
    over them and makes the host wait for a GPU (``TORCHEMBED_CHECK_OPERATIONS=1``)."""
    return _is_on("TORCHEMBED_CHECK_OPERATIONS")


def native_library() -> Path | None:
    """The file to load in place of the package's own C++ library (``TORCHEMBED_LIBRARY``)."""
    path = os.environ.get("TORCHEMBED_LIBRARY")
    return Path(path) if path else None
