"""Entries of the zoo that a pipeline does not train as it should yet, with their outcome and why.

An entry that is not here is captured and equal to the plain loop, or trained eagerly with a word
why and equal. Whoever mends an entry takes it out: a test fails where one of them is mended.
"""

from typing import NamedTuple

from tests.zoo.harness import Kind


class KnownFault(NamedTuple):
    """How an entry is trained today, and why."""

    kind: Kind
    reason: str


KNOWN_FAULTS = {
    # Of Python, which a graph does not run.
    "layers wrapped to print their shapes": KnownFault(Kind.DIFFERENT, "a graph counts no calls"),
    # Of what the loop changes between steps.
    "losses kept in a list": KnownFault(Kind.DIFFERENT, "the next step but one overwrites a loss"),
    # Of optimizers.
    "gradients accumulated over two steps by a fused optimizer": KnownFault(
        Kind.DIFFERENT_SAID, "a graph repeats the step of its capture; the self-check sees it late"
    ),
    "gradients accumulated over two steps by torch's Adam": KnownFault(
        Kind.DIFFERENT, "a graph writes over gradients that the optimizer keeps"
    ),
    # Of rounding.
    "tables called twice": KnownFault(
        Kind.DIFFERENT,
        "one lookup serves both calls, so a row's gradients are summed in another order",
    ),
}
