"""The site of docs/ builds without a warning, and its notebooks run."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, run_python_or_fail

NOTEBOOKS = sorted((ROOT / "docs/examples").glob("*.ipynb"))
OF_PACKAGES = "torchembed.ops"
"""The page that shows the packages in it."""
OF_ROOMS = {"torchembed.core.ranks", "torchembed.tables.tiers"}
"""Packages whose names are for the library's own rooms."""


def test_the_site_is_whole(tmp_path: Path) -> None:
    """mkdocs fails at a link, an anchor or a reference that leads nowhere, and at pages that the
    navigation leaves out."""
    pytest.importorskip("mkdocstrings", reason="needs torchembed[docs]")
    config = ROOT / "docs/site/mkdocs.yml"
    run_python_or_fail(
        *("-m", "mkdocs", "build", "--quiet", "--config-file", str(config)),
        *("--site-dir", str(tmp_path)),
        cwd=ROOT,
        NO_MKDOCS_2_WARNING="1",
    )
    reference = (tmp_path / "reference/torchembed.training.html").read_text()
    assert 'id="torchembed.training.TrainPipeline.progress"' in reference
    assert not re.search(r":(?:attr|class|func|meth):", reference)
    notebook = (tmp_path / "examples/first-steps.html").read_text()
    assert "100% right" in notebook
    found = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    assert any(page["location"].startswith("reference/torchembed.optim.html#") for page in found)


def test_navigation_lists_every_public_package() -> None:
    """A package is public where it has ``__all__``; a page shows it, or the packages in it."""
    navigation = (ROOT / "docs/site/mkdocs.yml").read_text()
    listed = re.findall(r"- reference/([\w.]+)\.md", navigation)
    public = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "torchembed").rglob("__init__.py")
        if re.search("^__all__", file.read_text(), re.MULTILINE)
    }
    packages = {name for name in listed if name in public}
    assert public - packages - OF_ROOMS == {
        name for name in public if name.startswith(f"{OF_PACKAGES}.")
    }
    assert set(listed) == packages | {OF_PACKAGES}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Each cell gives what is stored: the same kinds of outputs, and the same words in them."""
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="needs torchembed[docs]")
    if path.stem == "export":
        pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
    copy = shutil.copy(path, tmp_path)
    run_python_or_fail("-m", "tests.support.notebook", copy, cwd=ROOT)
    outputs = outputs_of(path)
    assert outputs_of(Path(copy)) == outputs
    assert any(outputs), "outputs must be stored"


def outputs_of(path: Path) -> list[list[tuple[str, str]]]:
    """Kinds and texts of each cell's outputs, without numbers, whose last digits may differ."""
    found = []
    for cell in json.loads(path.read_text())["cells"]:
        texts = [(o["output_type"], "".join(_text(o))) for o in cell.get("outputs", [])]
        found.append([(kind, re.sub(r"[\s\d.+-]+", " ", text)) for kind, text in texts])
    return found


def _text(output: dict) -> list[str]:
    return output["text"] if "text" in output else output["data"]["text/plain"]
