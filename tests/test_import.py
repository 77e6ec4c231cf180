"""``import torchembed`` is light: it imports its own lower rooms and nothing else."""

import json
import sys

from tests.support.source_tree import ROOT, run_python_or_fail

LATER_ROOMS = ("triton_kernels", "data", "models", "training", "integrations", "export", "doctor")
"""Imported by the programs that use them."""
MEASURE = """
import json, sys

import numpy
import torch

before = set(sys.modules)
import torchembed

print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_adds_its_own_lower_rooms_to_torch_and_numpy() -> None:
    """The modules that are imported count, and not how long it takes: that depends on the machine.
    Rooms of torch that torch leaves for later (Dynamo, Inductor, parts of torch.distributed) are
    foreign, as Triton and sympy are."""
    added: list[str] = json.loads(run_python_or_fail("-W", "ignore", "-c", MEASURE, cwd=ROOT))
    ours = [name for name in added if name.partition(".")[0] == "torchembed"]
    known = {"torchembed", "numpy", *sys.stdlib_module_names}
    assert [name for name in added if name.partition(".")[0] not in known] == []
    rooms = {name.split(".")[1] for name in ours if "." in name}
    assert {"core", "ops", "modules"} <= rooms
    assert rooms.isdisjoint(LATER_ROOMS)
