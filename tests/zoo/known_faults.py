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
KNOWN_FAULTS_ON_RANKS: dict[str, KnownFault] = {}
