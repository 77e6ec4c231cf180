"""``import torchembed`` is light: it imports its own lower rooms and nothing else."""

import json
import sys
from types import ModuleType

import pytest

import torchembed
import torchembed.stores
from tests.support.source_tree import ROOT, run_python_or_fail

LATER_ROOMS = (
    *("triton_kernels", "data", "models", "training", "integrations", "export", "doctor"),
    *("checkpoints", "serving", "sharding", "step", "streams"),
)
"""Imported by the programs that use them."""
LATER_FOLDERS = (
    "torchembed.modules.sharded",
    "torchembed.stores.memory",
    "torchembed.stores.read_ahead",
    "torchembed.stores.redis",
    "torchembed.stores.rocksdb",
    "torchembed.stores.volatile",
)
"""Imported where a name of theirs is first used."""
MEASURE = """
import json, sys

import numpy
import torch

before = set(sys.modules)
import torchembed

print(json.dumps(sorted(set(sys.modules) - before)))
assert torchembed.sharding.Planner.__name__ == "Planner"
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
    assert [name for name in ours if name.startswith(LATER_FOLDERS)] == []
    # Each costs about a millisecond. There were 268 once the largest parts were imported later.
    assert len(ours) <= 275


@pytest.mark.parametrize("package", [torchembed, torchembed.modules, torchembed.stores])
def test_names_that_are_imported_later_are_there(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ in (name, f"torchembed.{name}")
        assert name in vars(package)
    assert set(package.__all__) <= {*dir(torchembed), *vars(package)}
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'no'"):
        package.no  # noqa: B018
