"""Whether all ranks run the same thing."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

import torchembed
from torchembed.training import ranks


def check_ranks_agree(**texts: str | Mapping[str, str]) -> None:
    """Raise on every rank where one of ``texts`` is not the same on all of them.

    Every rank must call it, best right after joining the others. Only a digest of each text is
    sent, unless they differ. A mapping is a text of lines ``key = value``, by key.

    Example:
        ``check_ranks_agree(config=repr(config), code=source_files(torchembed))``

    Raises:
        ValueError: names what differs, between which ranks, and its first line that does.
    """
    lines = {name: _lines(text) for name, text in texts.items()}
    digests = {name: _digest("\n".join(its_lines)) for name, its_lines in lines.items()}
    if len(set(map(_frozen, ranks.gather_objects(digests)))) == 1:
        return
    by_rank = ranks.gather_objects(lines)
    for rank, theirs in enumerate(by_rank):
        for name in dict.fromkeys([*by_rank[0], *theirs]):
            first, other = by_rank[0].get(name, []), theirs.get(name, [])
            if first != other:
                raise ValueError(
                    f"ranks must agree on {name}: rank 0 has {_only_in(first, other)}, rank {rank} "
                    f"has {_only_in(other, first)}; start every rank with the same code and "
                    "arguments"
                )


def source_files(*packages: ModuleType) -> dict[str, str]:
    """A digest of each Python file and compiled library of ``packages``, and the versions of
    torchembed and torch: what :func:`check_ranks_agree` compares as the code."""
    files = {"torchembed": torchembed.__version__, "torch": torch.__version__}
    for package in packages:
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


def _only_in(lines: list[str], other: list[str]) -> str:
    return next((line for line in lines if line not in other), "no such line")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _frozen(digests: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(digests.items()))
