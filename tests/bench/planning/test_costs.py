"""The planner's cost model predicts what was measured."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.planning import costs
from tests.support.planning import cost_model, dlrm_dcnv2
from tests.support.tolerance import relative_error
from torchembed.sharding import H200, Placement, Planner, Topology
from torchembed.sharding.planning.loads import Load
from torchembed.sharding.planning.plan import place_table

MAX_ERROR = 0.25
# Of the CUDA update, alone: samples and microseconds.
UPDATES = [
    ("H200", "Adagrad", "uniform", 8192, 829),
    ("H200", "row-wise Adagrad", "uniform", 8192, 561),
    ("H100", "Adagrad", "uniform", 8192, 1165),
    ("H100", "Adagrad", "zipf", 8192, 541),
    ("H100", "Adagrad", "uniform", 2048, 329),
    ("H100", "Adagrad", "zipf", 2048, 165),
    ("H100", "Adagrad", "uniform", 512, 105),
    ("H100", "Adagrad", "zipf", 512, 69),
    ("H100", "row-wise Adagrad", "uniform", 8192, 728),
    ("H100", "row-wise Adagrad", "uniform", 512, 75),
]
# In a step on 4 H200, 8192 samples each, uniform ids: column-wise shards of some width of these
# tables on one rank; microseconds of lookup and update.
NARROW = [
    (32, ("cat_20", "cat_21"), 180, 887),
    (32, ("cat_20",), 118, 623),
    (64, ("cat_3", "cat_11", "cat_19"), 56, None),
    (64, ("cat_21",), 63, 330),
]
# Over 8 H200, in CUDA graphs: bytes of a rank and microseconds.
ALL_TO_ALL = [(3.4e6, 48), (6.8e6, 56), (13.6e6, 70), (27e6, 110), (54.5e6, 185), (109e6, 326)]
ALL_REDUCE = [(32e6, 206), (64e6, 355)]


def wire(collective: str, num_bytes: float, us: float) -> dict[str, Any]:
    return {
        "bench": "wires", "collective": collective, "gpu": "NVIDIA H200", "num_gpus": 8,
        "bytes": num_bytes, "microseconds": us,
    }  # fmt: skip


WIRES = [
    *(wire("all-to-all", *figures) for figures in ALL_TO_ALL),
    *(wire("all-reduce", *figures) for figures in ALL_REDUCE),
]


def test_stages_are_predicted() -> None:
    found = costs.predictions([*WIRES, *costs.stored_rows(costs.RESULTS)])
    stages = {(e.what.split()[1], " ".join(e.what.split()[5:])) for e in found if "step" in e.what}
    assert {gpu for gpu, _ in stages} == {"H100", "H200"}
    of_memory, on_several = {"lookup", "row update", "dense update"}, {"exchange", "mean"}
    # Both compute at one rate; only one was measured with the dense part's kernels of now.
    of_products = {"dense forward", "dense backward"}
    assert {stage for gpu, stage in stages if gpu == "H100"} >= of_memory | of_products
    assert {stage for gpu, stage in stages if gpu == "H200"} >= of_memory | on_several
    for each in found:
        assert abs(each.predicted / each.measured - 1) <= MAX_ERROR, each


def test_updates_by_the_cuda_kernel_are_predicted() -> None:
    rows = [
        {
            "bench": "kernels", "stage": "update", "gpu": gpu, "optimizer": optimizer, "ids": ids,
            "batch_per_gpu": batch_size, "microseconds": us,
        }
        for gpu, optimizer, ids, batch_size, us in UPDATES
    ]  # fmt: skip
    for each in costs.predictions(rows):
        assert abs(each.predicted / each.measured - 1) <= 0.1, each


@pytest.mark.parametrize(("width", "names", "lookup_us", "update_us"), NARROW)
def test_narrow_rows_are_predicted(
    width: int, names: tuple[str, ...], lookup_us: float, update_us: float | None
) -> None:
    tables, hotness = dlrm_dcnv2()
    topology = Topology.of_hardware(H200, ranks_per_node=4)
    planner = Planner(batch_size=8192, hotness=hotness, fixed_hotness=True)
    model = cost_model(planner, topology)
    ranks = range(128 // width)
    plans = [place_table(name, tables[name].spec, Placement.COLUMN_WISE, ranks) for name in names]
    load = np.sum([model.table_loads(tables[plan.table], plan)[0][0] for plan in plans], axis=0)
    lookup = model.lookup_seconds(load[Load.LOOKUP], 1)
    assert lookup * 1e6 == pytest.approx(lookup_us, rel=MAX_ERROR)
    if update_us is not None:
        update = model.update_seconds(load[Load.UPDATE], 1)
        assert update * 1e6 == pytest.approx(update_us, rel=0.1)


def test_a_fit_finds_what_made_the_figures() -> None:
    exact = [costs.Prediction("", size, 5e-6 + size / 2e12, 0.0) for size in (1e6, 1e8, 3e9)]
    fixed, rate = costs.fitted(exact)
    # Least squares leave residuals of some roundings of the products that add up to them: the norms
    # of matrix and solution. Beside them each figure is 1.
    terms = np.array([[1.0, each.num_bytes] for each in exact]) / [[e.measured] for e in exact]
    size = np.linalg.norm(terms) * math.hypot(fixed, 1 / rate) + math.sqrt(len(exact))
    residuals = terms @ [fixed, 1 / rate] - 1
    assert np.abs(residuals).max() <= relative_error(8, torch.float64) * size


def test_bench_prints_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = {
        "bench": "kernels", "system": "torchembed", "stage": "update", "batch_per_gpu": 8192,
        "ids": "uniform", "optimizer": "Adagrad", "microseconds": 1245.0,
    }  # fmt: skip
    unknown = update | {"gpu": "another"}
    others = [update | {"stage": "backward"}, update | {"system": "FBGEMM"}, unknown]
    stored = {"hardware": {"gpu": "NVIDIA H100"}, "rows": [update, *others, *WIRES]}
    (tmp_path / "a.json").write_text(json.dumps(stored))
    monkeypatch.setattr("sys.argv", ["costs", "--results", str(tmp_path)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    costs.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(WIRES) + 2
    assert lines[0].startswith("H100 update 8192 uniform Adagrad")
    assert lines[-2].startswith("all-     fits ")
    assert lines[-1].startswith("off by ")
