"""Models and habits are trained by the pipeline as by a plain loop on two ranks, too.

Their tables are sharded over the ranks, and each rank trains batches of its own. Captured steps are
replayed from a tape, but padded ones, which several ranks call again.
"""

import itertools
import traceback
from collections.abc import Sequence

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.tape import taped_captures
from tests.zoo.dynamic_tables import DYNAMIC, DYNAMIC_MODULES
from tests.zoo.harness import Kind, Outcome, joint, outcome_of
from tests.zoo.known_faults import KNOWN_FAULTS, KNOWN_FAULTS_ON_RANKS
from tests.zoo.sizes import tiny
from tests.zoo.zoo import ENTRIES, FAMILIES

NUM_RANKS = 2
MODELS = (
    "pooled",
    "sequences",
    "jagged sequences",
    "torchembed's sequences",
    "tasks",
    "layers",
)
"""Families whose entries differ little in what ranks do: one in eight is trained here, and one in
two of the others. All of them are by ``torchrun -m bench.models``."""
STRIDES = dict.fromkeys((*MODELS, DYNAMIC.name), 8)
CHOSEN = {
    family.name: [entry.name for entry in family.entries[:: STRIDES.get(family.name, 2)]]
    for family in FAMILIES
    if family is not DYNAMIC_MODULES  # which ranks refuse to share
}
MENDED = (Kind.CAPTURED, Kind.ROUNDED, Kind.SAID)
NAMES = [*itertools.chain.from_iterable(CHOSEN.values())]


def outcomes_on_a_rank(names: Sequence[str]) -> list[Outcome]:
    """The outcome of each entry; a traceback for its words where the plain loop fails."""
    found = []
    for name in names:
        try:
            with taped_captures():
                found.append(outcome_of(ENTRIES[name], tiny(torch.device("cpu"))))
        except Exception:  # noqa: BLE001 - it is reported as the outcome of this entry
            found.append(Outcome(Kind.RAISES, traceback.format_exc()))
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Those of both ranks, for the entries whose tests were selected; one launch trains them."""
    names: list[str] = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        if "outcomes" in item.fixturenames
    ]
    by_rank = run_on_ranks(NUM_RANKS, outcomes_on_a_rank, names)
    return dict(zip(names, map(joint, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_equal_and_captured_or_said_on_two_ranks(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[name]
    known = KNOWN_FAULTS_ON_RANKS.get(name, KNOWN_FAULTS.get(name))
    if known is None:
        assert outcome.kind in MENDED, str(outcome)
        return
    assert outcome.kind not in MENDED, f"{name} is {outcome}: take it out of the known faults"
    assert outcome.kind is known.kind, str(outcome)
    pytest.xfail(f"{outcome}; {known.reason}")


def test_known_faults_are_entries() -> None:
    assert KNOWN_FAULTS_ON_RANKS.keys() <= ENTRIES.keys()
    assert CHOSEN.keys() >= set(MODELS)
