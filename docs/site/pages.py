"""Pages of the site that are no files of docs/: those of the repository's root, and the API."""

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "ENVS.md": "ENVS.md",
    "LICENSE": "LICENSE",
}
"""Files of the repository's root, and where they stand beside the pages of docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and one for each module of the reference in the navigation."""
    for name, place in ROOT_PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, place, content=text))
    shown: set[str] = set()
    for place in _references(config.nav):
        text = _reference(Path(place).stem, shown)
        files.append(File.generated(config, place, content=text))
    return files


def _references(nav: object) -> list[str]:
    """The pages of the navigation that are in reference/."""
    if isinstance(nav, list):
        return [place for part in nav for place in _references(part)]
    if isinstance(nav, dict):
        return _references(list(nav.values()))
    return [nav] if isinstance(nav, str) and nav.startswith("reference/") else []


def _reference(module: str, shown: set[str]) -> str:
    """The page of a module: its public names, less those that an earlier page has."""
    file = ROOT.joinpath(*module.split("."), "__init__.py")
    names = [name for name in _public_names(file) if name not in shown]
    shown.update(names)
    members = "".join(f"\n        - {name}" for name in names)
    return f"# {module}\n\n::: {module}\n    options:\n      members:{members}\n"


def _public_names(file: Path) -> list[str]:
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return ast.literal_eval(statement.value)
    raise ValueError(f"{file} must have __all__, the names that the reference shows")
