"""The examples of README.md and docs/ run as they stand.

One that is started by ``torchrun`` runs on as many ranks; the others run in the process of the
tests, where a warning is an error.
"""

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from tests.support.clicks import import_torchrec
from tests.support.ranks import run_program_on_ranks
from tests.support.source_tree import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Example(NamedTuple):
    page: str
    number: int
    text: str

    @property
    def num_ranks(self) -> int | None:
        """Those that ``torchrun`` starts for the example; None where it is not started by it."""
        start = re.match(r"# Start with: torchrun (.*) train.py\n", self.text)
        if start is None:
            return None
        return int(get_args_parser().parse_args([*start[1].split(), "train.py"]).nproc_per_node)


def examples_of(page: Path) -> list[Example]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [Example(page.stem, number, text) for number, text in enumerate(blocks, start=1)]


EXAMPLES = [example for page in PAGES for example in examples_of(page)]


def test_the_readme_has_one_short_example() -> None:
    (example,) = (e for e in EXAMPLES if e.page == "README")
    assert len(example.text.splitlines()) <= 14
    assert example.num_ranks is None


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
    monkeypatch.chdir(tmp_path)
    if example.num_ranks is not None:
        run_program_on_ranks(example.num_ranks, program)
    else:
        runpy.run_path(str(program), run_name="__main__")
