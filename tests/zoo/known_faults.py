"""Entries of the zoo that a pipeline does not train as it should yet, with their outcome and why.

``KNOWN_FAULTS`` are those of any number of ranks, ``KNOWN_FAULTS_ON_RANKS`` those of several alone.
An entry that is not here is captured and equal to the plain loop, or trained eagerly with a word
why and equal. Whoever mends an entry takes it out: a test fails where one of them is mended.
"""

from typing import NamedTuple

from tests.zoo.harness import Kind


class KnownFault(NamedTuple):
    """How an entry is trained today, and why."""

    kind: Kind
    reason: str


KNOWN_FAULTS: dict[str, KnownFault] = {}

_TWO_STEPS_LATE = "the ranks agree on a batch two steps ahead, and a change concerns the next one"

KNOWN_FAULTS_ON_RANKS = {
    "number of a module changed between steps": KnownFault(Kind.DIFFERENT_SAID, _TWO_STEPS_LATE),
    "dropout rate changed between steps": KnownFault(Kind.DIFFERENT_SAID, _TWO_STEPS_LATE),
    "layer replaced in the middle": KnownFault(Kind.DIFFERENT_SAID, _TWO_STEPS_LATE),
    "hook that is registered in the middle": KnownFault(Kind.DIFFERENT_SAID, _TWO_STEPS_LATE),
    "a weight of the loss that the loop changes": KnownFault(Kind.DIFFERENT_SAID, _TWO_STEPS_LATE),
    "settings that the loop changes": KnownFault(Kind.DIFFERENT_SAID, _TWO_STEPS_LATE),
}
