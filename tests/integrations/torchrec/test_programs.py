"""A script of TorchRec's gives the same through ``run``."""

import importlib.util
import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks

SCRIPT = str(Path(__file__).parent / "dlrm_script.py")


PLACEMENTS = {
    "one": ["table_wise"] * 3,
    "three": ["table_wise", "column_wise", "data_parallel"],
}


def run_all(folder: str) -> None:
    """On a rank: the script as it is, then through ``run``, then with our pipeline, too."""
    import torchrec.distributed

    from torchembed.integrations.torchrec import TrainPipeline
    from torchembed.integrations.torchrec.run import run

    for name, placements in PLACEMENTS.items():
        sys.argv = [SCRIPT, f"{folder}/theirs/{name}", *placements]
        runpy.run_path(SCRIPT, run_name="__main__")
    for name, placements in PLACEMENTS.items():
        run([SCRIPT, f"{folder}/ours/{name}", *placements])
    torchrec.distributed.TrainPipelineSparseDist = TrainPipeline  # type: ignore[misc,assignment]
    for name, placements in PLACEMENTS.items():
        run([SCRIPT, f"{folder}/our pipeline/{name}", *placements])


def test_a_script_gives_the_same_through_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    for whose in ("theirs", "ours", "our pipeline"):
        for name in PLACEMENTS:
            (tmp_path / whose / name).mkdir(parents=True)
    run_on_ranks(2, run_all, str(tmp_path))
    for name, rank, whose in itertools.product(PLACEMENTS, range(2), ("ours", "our pipeline")):
        theirs, ours = (_result(tmp_path / of / name, rank) for of in ("theirs", whose))
        assert theirs["plan"] == ours["plan"]
        sharded = "torchembed.integrations.torchrec.sharded"
        assert sharded in ours["kinds"] and sharded not in theirs["kinds"]
        # Some rounding of float32; a wrong update shows in the third digit.
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["predictions"] == pytest.approx(theirs["predictions"], rel=1e-5, abs=1e-6)
        for metric, sums in theirs["metrics"].items():
            assert ours["metrics"][metric] == pytest.approx(sums, rel=1e-6)


def _result(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{rank}.json").read_text())
