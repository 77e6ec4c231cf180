"""The table of versions, its script, and the page that shows it."""

import re
import tomllib

import pytest

from tests.support.source_tree import ROOT, run_python, run_python_or_fail
from torchembed.core import versions

SCRIPT = "torchembed/core/versions.py"


def test_script_prints_pinned_requirements_without_torch() -> None:
    """-S hides every installed package, as on a machine where nothing is installed yet."""
    lines = run_python_or_fail("-S", SCRIPT, "--requirements", "cpu", cwd=ROOT).splitlines()
    assert lines[0] == "torch==2.13.0"
    assert {"triton==3.7.1", "fbgemm-gpu-cpu==1.8.0"} <= set(lines)
    assert not any(line.startswith("torchrec") for line in lines)
    gpu = run_python_or_fail("-S", SCRIPT, "--requirements", "gpu", cwd=ROOT).splitlines()
    assert "fbgemm-gpu==1.8.0" in gpu
    alone = run_python_or_fail("-S", SCRIPT, "--requirements-without-dependencies", cwd=ROOT)
    assert alone.split() == ["torchrec==1.8.0"]


def test_script_names_every_missing_module() -> None:
    run = run_python("-S", SCRIPT, "--missing", "train", cwd=ROOT)
    assert run.returncode == 1
    assert run.stdout == ""
    for name in versions.NEEDED_MODULES["train"]:
        assert re.search(rf"\b{name}\b", run.stderr)


def test_numpy_that_is_set_up_suits_the_interpreter() -> None:
    assert versions.release_number(versions.NUMPY) < versions.release_number(versions.NUMPY_LIMIT)


@pytest.mark.parametrize("row", versions.PAIRINGS, ids=lambda row: row.torch)
def test_pairing_is_found_by_release(row: versions.Pairing) -> None:
    assert versions.pairing_of(f"{versions.release(row.torch)}.7+cu130") == row


def test_unknown_torch_has_no_pairing() -> None:
    assert versions.pairing_of("2.1.0") is None


def test_the_page_shows_the_table() -> None:
    assert versions.pairings_table() in (ROOT / "docs/torchrec.md").read_text()


def test_dependencies_are_the_oldest_of_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, extras = versions.PAIRINGS[0], project["optional-dependencies"]
    assert f"torch>={versions.release(oldest.torch)}" in project["dependencies"]
    assert extras["torchrec"] == [f"torchrec>={versions.release(oldest.torchrec)}"]
    triton = f"triton>={versions.release(oldest.triton)}; platform_system == 'Linux'"
    assert triton in extras["test"]


def test_only_tests_ask_for_triton() -> None:
    """A torch for GPUs brings its own; where torch is built for the CPU, nothing needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"] | {"base": project["dependencies"]}
    asking = [
        name for name, lines in groups.items() if any(re.match(r"triton\b", line) for line in lines)
    ]
    assert asking == ["test"]
