"""Models and habits, as users write them, are trained by the pipeline as by a plain loop.

Captured steps are replayed from a tape, which runs no Python, as a CUDA graph runs none.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.support.tape import taped_captures
from tests.zoo.harness import Kind, outcome_of
from tests.zoo.known_faults import KNOWN_FAULTS
from tests.zoo.sizes import tiny
from tests.zoo.zoo import ENTRIES, FAMILIES

SIZES = tiny(torch.device("cpu"))
MENDED = (Kind.CAPTURED, Kind.ROUNDED, Kind.SAID)


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_equal_and_captured_or_said(name: str) -> None:
    outcome = outcome_of(ENTRIES[name], SIZES)
    known = KNOWN_FAULTS.get(name)
    if known is None:
        assert outcome.kind in MENDED, str(outcome)
        return
    assert outcome.kind not in MENDED, f"{name} is {outcome}: take it out of KNOWN_FAULTS"
    assert outcome.kind is known.kind, str(outcome)
    pytest.xfail(f"{outcome}; {known.reason}")


@pytest.mark.parametrize(
    "name",
    [
        "SASRec, padded to each batch",
        "DIN, padded to each batch",
        "batches of two sizes in turns",
        "a bag between offsets",
    ],
)
def test_entries_whose_layouts_recur_are_captured(name: str) -> None:
    outcome = outcome_of(ENTRIES[name], SIZES, num_steps=24)
    assert (outcome.kind, outcome.words) == (Kind.CAPTURED, "")


def test_known_faults_are_entries_and_names_are_single() -> None:
    assert KNOWN_FAULTS.keys() <= ENTRIES.keys()
    assert len(ENTRIES) == sum(len(family.entries) for family in FAMILIES)
