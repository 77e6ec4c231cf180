"""The examples of README.md run as they stand."""

import re
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, run_python_or_fail

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_has_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=["torchrun", "drop_in", "torchrec"])
def test_readme_example_runs(example: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(example)
    start = re.match(r"# Start with: torchrun (.*) train.py\n", example)
    launcher = ["-m", "torch.distributed.run", *start[1].split()] if start else []
    run_python_or_fail(
        *launcher, str(program), cwd=tmp_path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"
    )
