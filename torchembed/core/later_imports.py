"""Names of a package whose modules are imported when they are first asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def later_imports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``, which imports names from their ``modules`` at first use.

    For parts that are large and that many programs never use; ``import`` of the package stays fast.
    Type checkers see such a name by an import under ``TYPE_CHECKING``.

    Args:
        package: its ``__name__``.
        modules: by name, the module that defines it, or that is a part of the package of this name.
    """

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        found = module if modules[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, found)  # so that the next use asks nobody
        return found

    return attribute
