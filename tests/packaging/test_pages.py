"""The pages say what is so."""

import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.clicks import import_torchrec
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
        path = ROOT.joinpath(*module.split("."))
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.exists(), f"{module} is no module"
        assert '__name__ == "__main__"' in file.read_text(), f"{module} is no program"


DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE_FILES = {"complete.json", "model.json", "rows.safetensors.index.json"}
"""Files that programs make, which pages name."""


def inline_code(page: str) -> set[str]:
    """The words between single backticks, outside blocks of code."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))


def is_there(path: str) -> bool:
    """True if a page may name ``path``: from the root, from torchembed/, or by its name alone."""
    if "/" in path:
        return any(any(base.glob(path.rstrip("/"))) for base in (ROOT, ROOT / "torchembed"))
    folders = (*PYTHON_FOLDERS, "csrc", "docs")
    return (ROOT / path).exists() or any(any((ROOT / f).rglob(path)) for f in folders)


def attribute(name: str) -> object:
    """The object of the dotted ``name``: a module, or something in one."""
    found = pkgutil.resolve_name(name.partition(".")[0])
    for end in range(2, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        child = part.rpartition(".")[2]
        found = getattr(found, child) if hasattr(found, child) else pkgutil.resolve_name(part)
    return found


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_path_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    links = set(re.findall(r"\]\((?!https?://|#)([^)#]+)", text))
    assert {link for link in links if not (page.parent / link).exists()} == set()
    endings = r"[\w./*-]+(?:\.(?:py|md|cpp|cu|cuh|h|json|toml|txt)|/)"
    paths = {code for code in inline_code(text) if re.fullmatch(endings, code)} - MADE_FILES
    assert {path for path in paths if not is_there(path)} == set()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_dotted_name_on_a_page_exists(page: Path) -> None:
    names = set(re.findall(r"(?<![\w.])torchembed(?:\.\w+)+", page.read_text()))
    if any(name.startswith("torchembed.integrations.torchrec") for name in names):
        import_torchrec()
    for name in names:
        attribute(name)


def test_the_drawing_of_the_packages_is_what_the_linter_holds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c.get("containers") == ["torchembed"])
    drawing = re.search(r"```\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL)
    assert drawing is not None
    assert re.findall(r"^  (\w+(?: \| \w+)*)  ", drawing[1], re.MULTILINE) == layers


TABLE_ROW = re.compile(r"^\|[^|]*?`((?:\w+/)*\w+\.py)`[^|]*\|(.*)\|$", re.MULTILINE)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_names_beside_a_file_are_of_that_file(page: Path) -> None:
    """In a table whose rows begin with a module of torchembed, names are that module's."""
    for path, rest in TABLE_ROW.findall(page.read_text()):
        if not (ROOT / "torchembed" / path).exists():
            continue
        module = "torchembed." + path.removesuffix(".py").replace("/", ".")
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", rest):
            attribute(f"{module}.{name}")


def test_a_name_that_is_not_there_is_found() -> None:
    with pytest.raises((AttributeError, ImportError)):
        attribute("torchembed.training.TrainPipelines")
    assert not is_there("step/no_such_file.py")
    assert is_there("step/pipeline.py")
    assert is_there("reference.py")
