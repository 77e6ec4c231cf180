"""``import torchembed`` is light."""

import json

from tests.packaging.source_tree import ROOT, run_python_or_fail

HEAVY = ("triton", "torchrec", "polars", "pyarrow", "torchmetrics", "tqdm", "tyro", "matplotlib")
MEASURE = """
import json, sys, time

import numpy
import torch

before = set(sys.modules)
start = time.process_time()
import torchembed

seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def test_import_takes_little_and_leaves_the_rest_for_later() -> None:
    command = ("-W", "ignore", "-c", MEASURE)
    runs = [json.loads(run_python_or_fail(*command, cwd=ROOT)) for _ in range(3)]
    imported = {name.partition(".")[0] for run in runs for name in run["modules"]}
    assert imported.isdisjoint(HEAVY)
    # The least time of the processor, so that other programs on the machine do not count.
    assert min(run["seconds"] for run in runs) < 0.3
