"""A script of TorchRec's gives the same through ``run``."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks

SCRIPT = str(Path(__file__).parent / "dlrm_script.py")


def run_twice(folder: str) -> None:
    """On a rank: the script as it is, then through ``run``."""
    from torchembed.integrations.torchrec.run import run

    sys.argv = [SCRIPT, f"{folder}/theirs"]
    runpy.run_path(SCRIPT, run_name="__main__")
    run([SCRIPT, f"{folder}/ours"])


def test_a_script_gives_the_same_through_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    for whose in ("theirs", "ours"):
        (tmp_path / whose).mkdir()
    run_on_ranks(2, run_twice, str(tmp_path))
    for rank in range(2):
        theirs, ours = (_result(tmp_path / whose, rank) for whose in ("theirs", "ours"))
        assert theirs["plan"] == ours["plan"]
        sharded = "torchembed.integrations.torchrec.sharded"
        assert sharded in ours["kinds"] and sharded not in theirs["kinds"]
        # Some rounding of float32; a wrong update shows in the third digit.
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["predictions"] == pytest.approx(theirs["predictions"], rel=1e-5, abs=1e-6)
        for name, sums in theirs["metrics"].items():
            assert ours["metrics"][name] == pytest.approx(sums, rel=1e-6)


def _result(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{rank}.json").read_text())
