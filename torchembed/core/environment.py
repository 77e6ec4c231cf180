"""The environment variables that torchembed reads, each in one function."""

import os


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "no")


def force_reference() -> bool:
    """True where every operation must run its reference (``TORCHEMBED_FORCE_REFERENCE=1``)."""
    return _is_on("TORCHEMBED_FORCE_REFERENCE")


def triton_interpreted() -> bool:
    """True where Triton's interpreter runs its kernels, on the CPU too (``TRITON_INTERPRET=1``)."""
    return _is_on("TRITON_INTERPRET")
