"""The examples of README.md and docs/ run as they stand.

One that is started by ``torchrun`` runs so, in processes of its own; the others run in the process
of the tests, where a warning is an error.
"""

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clicks import import_torchrec
from tests.support.source_tree import ROOT, run_python_or_fail

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Example(NamedTuple):
    page: str
    number: int
    text: str

    @property
    def launcher(self) -> list[str]:
        """The command that starts the example, less the interpreter and the program."""
        start = re.match(r"# Start with: torchrun (.*) train.py\n", self.text)
        return ["-m", "torch.distributed.run", *start[1].split()] if start else []


def examples_of(page: Path) -> list[Example]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [Example(page.stem, number, text) for number, text in enumerate(blocks, start=1)]


EXAMPLES = [example for page in PAGES for example in examples_of(page)]


def test_the_readme_has_one_short_example() -> None:
    (example,) = (e for e in EXAMPLES if e.page == "README")
    assert len(example.text.splitlines()) <= 14
    assert not example.launcher


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda example: f"{example.page}-{example.number}"
)
def test_example_runs(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torchrec" in example.text:
        import_torchrec()
    if "onnxruntime" in example.text:
        pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
    program = tmp_path / "train.py"
    program.write_text(example.text)
    if example.launcher:
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        run_python_or_fail(*example.launcher, str(program), cwd=tmp_path, **paths)
    else:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(program), run_name="__main__")
