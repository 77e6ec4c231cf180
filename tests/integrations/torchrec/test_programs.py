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
from tests.support.tolerance import assert_within_drift

SCRIPT = str(Path(__file__).parent / "dlrm_script.py")
NUM_STEPS = 8
"""That the script trains."""

PLACEMENTS = {
    "one": ["table_wise"] * 3,
    "three": ["table_wise", "column_wise", "data_parallel"],
}


def run_all(folder: str) -> None:
    """On a rank: the script as it is, from nudged parameters, then through ``run``, then with
    our pipeline, too."""
    import torchrec.distributed

    from tests.support.torchrec_training import nudge
    from torchembed.integrations.torchrec import TrainPipeline
    from torchembed.integrations.torchrec.run import run

    for name, placements in PLACEMENTS.items():
        sys.argv = [SCRIPT, f"{folder}/theirs/{name}", *placements]
        runpy.run_path(SCRIPT, run_name="__main__")
    parallel = torchrec.distributed.DistributedModelParallel

    def nudged(*args: Any, **kwargs: Any) -> Any:
        model = parallel(*args, **kwargs)
        nudge(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchrec.distributed, "DistributedModelParallel", nudged)
        for name, placements in PLACEMENTS.items():
            sys.argv = [SCRIPT, f"{folder}/nudged/{name}", *placements]
            runpy.run_path(SCRIPT, run_name="__main__")
    for name, placements in PLACEMENTS.items():
        run([SCRIPT, f"{folder}/ours/{name}", *placements])
    torchrec.distributed.TrainPipelineSparseDist = TrainPipeline  # type: ignore[misc,assignment]
    for name, placements in PLACEMENTS.items():
        run([SCRIPT, f"{folder}/our pipeline/{name}", *placements])


def test_a_script_gives_the_same_through_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    for whose in ("theirs", "nudged", "ours", "our pipeline"):
        for name in PLACEMENTS:
            (tmp_path / whose / name).mkdir(parents=True)
    run_on_ranks(2, run_all, str(tmp_path))
    for name, rank, whose in itertools.product(PLACEMENTS, range(2), ("ours", "our pipeline")):
        theirs, nudged, ours = (
            _result(tmp_path / of / name, rank) for of in ("theirs", "nudged", whose)
        )
        assert theirs["plan"] == ours["plan"]
        sharded = "torchembed.integrations.torchrec.sharded"
        assert sharded in ours["kinds"] and sharded not in theirs["kinds"]
        runs = [ours, theirs, nudged]
        assert_within_drift(*(run["losses"] for run in runs), num_steps=NUM_STEPS)
        predictions = [run["predictions"] for run in runs]
        # Some are near 0, and none is more exact than the largest.
        largest = max(map(abs, theirs["predictions"]))
        assert_within_drift(*predictions, num_steps=NUM_STEPS, size=largest)
        for metric, sums in theirs["metrics"].items():
            of_runs = [run["metrics"][metric] for run in runs]
            if nudged["metrics"][metric] == sums:
                assert ours["metrics"][metric] == sums
            else:
                assert_within_drift(*of_runs, num_steps=NUM_STEPS)


def _result(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{rank}.json").read_text())
