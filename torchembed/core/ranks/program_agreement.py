"""Checks that all ranks run the same program with the same settings."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

from torchembed.core import ranks
from torchembed.core.ranks.agreement import check_agreement


def check_ranks_agree(**texts: str | Mapping[str, str]) -> None:
    """Raise on every rank unless each of ``texts`` is the same on all of them.

    Every rank must call it, best right after joining the others. Only a digest of each text is
    sent, unless they differ. A mapping is a text of lines ``key = value``, by key.

    Example:
        ``check_ranks_agree(config=repr(config), code=source_files(torchembed))``

    Raises:
        ValueError: names the text that differs, two ranks where it does, and the first line that
            one has and the other lacks.
    """
    if ranks.world_size() > 1:
        check_agreement({name: _lines(text) for name, text in texts.items()})


def source_files(*packages: ModuleType) -> dict[str, str]:
    """A digest of each Python file and compiled library of ``packages``, and their versions and
    torch's, for :func:`check_ranks_agree` to compare as the code."""
    files = {"torch": str(torch.__version__)}
    for package in packages:
        if hasattr(package, "__version__"):
            files[package.__name__] = package.__version__
        for root in map(Path, package.__path__):
            # Not rglob, which leaves out folders behind symbolic links.
            for folder, _, names in sorted(os.walk(root, followlinks=True)):
                for name in sorted(names):
                    if name.endswith((".py", ".so")):
                        path = Path(folder, name)
                        key = f"{package.__name__}/{path.relative_to(root)}"
                        files[key] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return files


def _lines(text: str | Mapping[str, str]) -> list[str]:
    if isinstance(text, str):
        return text.splitlines()
    return [f"{key} = {value}" for key, value in sorted(text.items())]
