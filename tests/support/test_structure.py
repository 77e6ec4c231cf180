"""How tests are divided: what several of them share is in tests/support, models in tests/zoo."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.schedule import LONGEST_FIRST, TOGETHER
from tests.support.source_tree import ROOT

TESTS = ROOT / "tests"


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names that ``source`` imports, at any place; relative ones begin with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def of_other_tests(source: str) -> list[str]:
    """Imports of ``source`` from the folder of tests, other than what tests share."""
    names = imported_modules(source)
    shared = ("tests.support.", "tests.zoo.")
    return [n for n in names if n.startswith((".", "tests.")) and not n.startswith(shared)]


def test_tests_import_what_they_share_and_no_other_test() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(TESTS.rglob("*.py"))
        if (names := of_other_tests(path.read_text()))
    }
    assert not found, f"move what several tests need to tests/support: {found}"


def test_every_form_of_import_is_seen() -> None:
    forms = """
import tests.ops.test_linear
from tests.ops import test_cross
def within():
    from tests.ops.test_push import CASES
    from . import beside
    from tests.support.values import normal
    import torch
"""
    assert of_other_tests(forms) == [
        "tests.ops.test_linear",
        "tests.ops.test_cross",
        "tests.ops.test_push.CASES",
        "..beside",
    ]


def test_what_tests_share_stands_in_folders_of_its_own() -> None:
    # Programs, which tests start and never import, may stand beside them.
    def is_program(path: Path) -> bool:
        return '__name__ == "__main__"' in path.read_text()

    others = [
        str(path.relative_to(ROOT))
        for path in sorted(TESTS.rglob("*.py"))
        if path.parent.name not in ("support", "zoo")
        and not path.name.startswith("test_")
        and path.name != "conftest.py"
        and not is_program(path)
    ]
    assert others == []


def test_what_is_scheduled_by_name_is_there() -> None:
    assert [path for path in (*LONGEST_FIRST, *TOGETHER) if not (ROOT / path).exists()] == []
