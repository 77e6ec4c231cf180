"""Paths told apart from URLs."""

import re
from pathlib import Path

_URL_AS_PATH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


def is_url(path: object) -> bool:
    """True for the URL of a file or folder, a string or an object that becomes one.

    Raises:
        ValueError: for a URL that was made a ``Path``, which takes a slash of it.
    """
    if not isinstance(path, Path):
        return "://" in str(path)
    if _URL_AS_PATH.match(str(path)):
        raise ValueError(
            f"path must be a string where it is a URL, got {path!r}, which has lost a slash"
        )
    return False
