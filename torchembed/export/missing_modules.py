"""The error of modules that an export needs and that are not installed."""

import importlib.util

EXPORT_MODULES = ("onnx", "onnxscript", "onnxruntime")
"""Modules that ``pip install 'torchembed[export]'`` brings."""


def check_installed(what: str) -> None:
    """Raise ``ImportError`` with the command that installs what is missing.

    Args:
        what: needs the modules, for the error.
    """
    missing = [name for name in EXPORT_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{what} needs {', '.join(missing)}, not installed here; run pip install "
            "'torchembed[export]'"
        )
