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
from torchembed import LFU, Dynamic

SCRIPT = str(Path(__file__).parent / "dlrm_script.py")
NUM_STEPS = 8
"""That the script trains."""

SHARDED = "torchembed.integrations.torchrec.sharded.collections"
PIPELINE = "torchembed.integrations.torchrec.pipeline.train_pipeline"


def run_all(folder: str) -> None:
    """On a rank: the script as it is, from nudged parameters, then through ``run``, with TorchRec's
    pipeline and with ours."""
    import torchrec.distributed
    from torchrec.modules import embedding_configs

    from tests.support.torchrec_training import nudge
    from torchembed.integrations.torchrec.run import run

    sys.argv = [SCRIPT, f"{folder}/theirs"]
    runpy.run_path(SCRIPT, run_name="__main__")
    parallel = torchrec.distributed.DistributedModelParallel

    def nudged(*args: Any, **kwargs: Any) -> Any:
        model = parallel(*args, **kwargs)
        nudge(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchrec.distributed, "DistributedModelParallel", nudged)
        sys.argv = [SCRIPT, f"{folder}/nudged"]
        runpy.run_path(SCRIPT, run_name="__main__")
    run(["--keep-pipeline", SCRIPT, f"{folder}/ours"])
    run([SCRIPT, f"{folder}/our pipeline"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_configs, "EmbeddingBagConfig", dynamic_config)
        run(["--keep-pipeline", SCRIPT, f"{folder}/dynamic"])
        run([SCRIPT, f"{folder}/dynamic, our pipeline"])


def dynamic_config(*, name: str, **arguments: Any) -> Any:
    """A config of the script, dynamic but for the table that it keeps on all ranks."""
    from torchembed.integrations.torchrec import EmbeddingBagConfig

    dynamic = None if name == "three" else Dynamic(eviction=LFU())
    return EmbeddingBagConfig(name=name, dynamic=dynamic, **arguments)


def test_a_script_gives_the_same_through_run(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("needs TorchRec and FBGEMM: pip install torchembed[torchrec]")
    of_dynamic = ("dynamic", "dynamic, our pipeline")
    for whose in ("theirs", "nudged", "ours", "our pipeline", *of_dynamic):
        (tmp_path / whose).mkdir()
    run_on_ranks(2, run_all, str(tmp_path))
    for rank, whose in itertools.product(range(2), ("ours", "our pipeline")):
        theirs, nudged, ours = (_result(tmp_path / of, rank) for of in ("theirs", "nudged", whose))
        assert theirs["plan"] == ours["plan"]
        assert SHARDED in ours["kinds"] and SHARDED not in theirs["kinds"]
        assert (PIPELINE in ours["kinds"]) == (whose == "our pipeline")
        runs = [ours, theirs, nudged]
        assert len(ours["losses"]) == NUM_STEPS
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
    for rank in range(2):
        theirs, nudged, by_hand, piped = (
            _result(tmp_path / of, rank) for of in ("theirs", "nudged", *of_dynamic)
        )
        assert by_hand["plan"] == piped["plan"]
        assert SHARDED in by_hand["kinds"] and PIPELINE in piped["kinds"]
        # Rows begin otherwise than static ones, and losses drift as much.
        drifted = [
            loss + b - a
            for loss, a, b in zip(
                by_hand["losses"], theirs["losses"], nudged["losses"], strict=True
            )
        ]
        assert_within_drift(piped["losses"], by_hand["losses"], drifted, num_steps=NUM_STEPS)


def _result(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{rank}.json").read_text())
