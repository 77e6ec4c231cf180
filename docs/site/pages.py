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
    """The page of a module, or of the packages in it where it has no public names itself."""
    folder = ROOT.joinpath(*module.split("."))
    if public_names(folder / "__init__.py") is not None:
        return f"# {module}\n\n{_members(module, shown)}"
    inner = [f"{module}.{p.parent.name}" for p in sorted(folder.glob("*/__init__.py"))]
    parts = [f"## {of}\n\n{_members(of, shown, level=3)}" for of in inner]
    return "\n".join([f"# {module}\n", *parts])


def _members(module: str, shown: set[str], level: int = 2) -> str:
    """The public names of a module, less those that an earlier page has."""
    file = ROOT.joinpath(*module.split("."), "__init__.py")
    public = public_names(file)
    if public is None:
        raise ValueError(f"{file} must have __all__, the names that the reference shows")
    names = [name for name in public if name not in shown]
    shown.update(names)
    members = "".join(f"\n        - {name}" for name in names)
    options = f"    options:\n      heading_level: {level}\n      members:{members}"
    return f"::: {module}\n{options}\n"


def public_names(file: Path) -> list[str] | None:
    """What ``__all__`` of a module lists; None where it has none."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return ast.literal_eval(statement.value)
    return None
