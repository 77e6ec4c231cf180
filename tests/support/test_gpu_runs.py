"""``tests/gpu/README.md`` says of every file of GPU tests when it last ran."""

import ast
import re
from pathlib import Path

from tests.support.source_tree import ROOT

TABLE = ROOT / "tests" / "gpu" / "README.md"
ROW = re.compile(r"^\| (tests/\S+\.py) \| (.+) \| (.+) \|$", re.MULTILINE)


def has_gpu_tests(path: Path) -> bool:
    """True where ``path`` names the mark ``pytest.mark.gpu``."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "gpu"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_every_file_of_gpu_tests_has_a_row() -> None:
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if has_gpu_tests(path)
    ]
    assert [file for file, _, _ in ROW.findall(TABLE.read_text())] == files


def test_rows_name_a_commit_and_hardware_or_say_that_nobody_did() -> None:
    for file, commit, hardware in ROW.findall(TABLE.read_text()):
        are_recorded = [field != "not recorded" for field in (commit, hardware)]
        assert are_recorded in ([True, True], [False, False]), file
        assert not are_recorded[0] or re.fullmatch(r"[0-9a-f]{7,40}", commit), file
