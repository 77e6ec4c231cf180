"""The pages say what is so."""

import re
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

PYTHON_FOLDERS = ("torchembed", "triton_kernels", "recipes", "bench", "tests")
NAME = r"TORCHEMBED_[A-Z][A-Z_]*[A-Z]"


def test_every_environment_variable_is_listed() -> None:
    used = set(re.findall(rf"\b{NAME}\b", (ROOT / "Makefile").read_text()))
    for folder in PYTHON_FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            used.update(re.findall(rf"\b{NAME}\b", path.read_text()))
    for path in filter(Path.is_file, (ROOT / "csrc").rglob("*")):
        # Macros have such names too: only what is read from the environment counts.
        used.update(re.findall(rf'getenv\("({NAME})"\)', path.read_text()))
    assert used == set(re.findall(rf"\b{NAME}\b", (ROOT / "ENVS.md").read_text()))


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "bench").rglob("*.py"),
]


def commands_of(page: str) -> set[str]:
    """The modules of ours that a page says to run, also where a command is cut into lines."""
    return set(re.findall(r"-m\s+((?:bench|recipes|torchembed)\.[\w.]*\w)", page))


def test_a_command_that_is_cut_into_lines_is_found() -> None:
    page = "`python -m bench.kernels.gpu` and `torchrun -m\nrecipes.train name`, not bench.step."
    assert commands_of(page) == {"bench.kernels.gpu", "recipes.train"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_programs(page: Path) -> None:
    for module in commands_of(page.read_text()):
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        assert file.exists(), f"{module} is no module"
        assert '__name__ == "__main__"' in file.read_text(), f"{module} is no program"
