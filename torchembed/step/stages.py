"""The stages of a batch on its way to its step, one frozen record for each, and kinds of steps.

read -> bucketized -> routed and admitted -> looked up -> trained. Which stages an engine
passes ahead of the step, and on which stream, is the engine's own; what each stage holds is not.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.core.trees import Tree
from torchembed.modules.lookup.bad_ids import IdCheck
from torchembed.modules.lookup.lookup_stages import Admitted, Bucketized, LookedUp
from torchembed.step.bad_id_flag import BadIdFlag
from torchembed.step.batches.padded_parts import PaddedBatch
from torchembed.step.lookup_calls import Call
from torchembed.step.step_result import ResultPlace, StepOutputs


class Reason(NamedTuple):
    """The cause of a step that is no captured one; one line as a string.

    A cause that recurs is equal each time: it holds no numbers that change from step to step.
    """

    what: str
    """Cause, and what to do about it where something can be done."""
    where: str = ""
    """Name of the module, optimizer, or part of the batch that it lies in; empty for the whole
    step."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class StepForm(enum.StrEnum):
    """The way in which a step runs."""

    GRAPH = "graph"
    """A replay of the captured step of one layout."""
    PADDED = "padded"
    """A replay of a captured step with room for more ids, or for padding, than the batch has."""
    JAGGED = "jagged"
    """Called as it is; a thread has exchanged the batch's sizes ahead."""
    EAGER = "eager"
    """Called as it is; nothing was prepared ahead, but in the first steps before a capture."""


class StepKind(NamedTuple):
    """The form of a step, and why it is no captured one."""

    form: StepForm
    """Equal to its string: ``kind.form == "graph"``."""
    why: Reason | None = None
    """None for captured steps."""

    def __str__(self) -> str:
        return str(self.form) if self.why is None else f"{self.form} ({self.why})"


class BatchKinds(NamedTuple):
    """The kinds of step that can train a batch; where there is none, an eager step does."""

    static: bool
    """The batch has fixed hotness, and a layout of captured steps."""
    jagged: bool
    """The batch has the layout of captured jagged steps, but for the lengths of its bags."""
    layout: int = 0
    """Number of the layout, which each rank gives to its own; 0 for none."""


NO_KIND = BatchKinds(static=False, jagged=False)
"""The kinds of a batch that eager steps alone can train."""


class Agreement(NamedTuple):
    """The kind and size of the batches that all ranks have read as number n."""

    kinds: BatchKinds
    """The kinds of step that can train the batch of every rank."""
    num_ids: int
    """The most ids that the sparse features of one rank's batch hold."""
    layouts_since: int = 0
    """Number of the last batch whose layout took over those of captured steps, on any rank."""
    layouts: tuple[int, ...] = ()
    """For each rank the number of its batch's layout."""
    has_spare: bool = False
    """True if a part of some rank's batch is padded."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReadBatch:
    """A batch that was read and not trained yet."""

    data: Tree
    number: int
    """Number of batches that were read before it; the same on all ranks."""
    kinds: BatchKinds
    """The kinds of step that can train this rank's batch."""
    agree: Callable[[], Agreement]
    """Waits, in any thread, for the other ranks to have read theirs."""
    why: Reason | None = None
    """The reason why no kind of step can train it; None where one can."""
    padded: PaddedBatch | None = None
    """With room for padding, as captured steps take it; None where it is not padded."""

    @property
    def form(self) -> Tree:
        """A batch of the shapes that captured steps take."""
        return self.data if self.padded is None else self.padded.form

    @property
    def source(self) -> Tree:
        """The tensors of the batch in a tree like :attr:`form`."""
        return self.data if self.padded is None else self.padded.source

    @property
    def buffer(self) -> int:
        """Index of the input buffer that the batch is copied to, 0 or 1."""
        return self.number % 2


@dataclasses.dataclass(frozen=True, eq=False)
class BucketizedBatch:
    """A batch on the device whose ids are sorted by the rank that holds their rows."""

    data: Tree
    lookups: Sequence[Bucketized]
    """For each lookup call of the model."""
    checks: list[IdCheck]
    ready: torch.cuda.Event | None = None
    """Recorded on a GPU once another stream may use it."""
    needed: Tensor | None = None
    """int64 ``[n]``: the capacity that the lookup calls need, one after the other; of padded
    steps."""
    num_needed: tuple[int, ...] = ()
    """The count of these numbers that are each call's."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdmittedBatch:
    """A batch whose ids are on the ranks that hold their rows, and whose rows are in the tables."""

    data: Tree
    lookups: Sequence[Admitted]
    """For each lookup call of the model."""
    flag: BadIdFlag | None
    checks: list[IdCheck]
    ready: torch.cuda.Event | None = None
    """Recorded on a GPU once another stream may use it."""
    epoch: Tensor | None = None
    """int64 ``[1]``: until its release the batch's rows stay in their places; None where they do in
    any case."""


@dataclasses.dataclass(frozen=True, eq=False)
class LookedUpBatch:
    """A batch whose vectors, for some lookup calls of the model, are there or under way."""

    data: Tree
    calls: Sequence[Call] = ()
    lookups: Sequence[LookedUp] = ()
    """One for each of ``calls``, of which some may be there more than once."""
    flag: BadIdFlag | None = None
    """Set where an id of ``calls`` is bad."""
    checks: list[IdCheck] = dataclasses.field(default_factory=list)
    epoch: Tensor | None = None
    """To be released once the batch is trained."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedBatch:
    """A step's result, and what the host needs to know once the device has done the step."""

    result: StepOutputs
    skip: Tensor | None
    """float32 ``[1]``: nothing was updated where it is not zero; None where all was."""
    report: Tensor | None
    """:meth:`~torchembed.step.bad_id_flag.BadIdFlag.to_host`; there once the step is done."""
    checks: list[IdCheck]
    source: Tree = None
    """Memory that the device may read until the step is done."""
    done: torch.cuda.Event | None = None
    """Recorded once the device has done the step; None: once it has done what the current stream
    holds now."""
    place: ResultPlace | None = None
    """The memory of the result; None for memory of its own."""

    def held_until(
        self, done: torch.cuda.Event | None, source: Tree, place: ResultPlace | None = None
    ) -> "TrainedBatch":
        """The same, with the result in ``place``; what ``source`` holds may be read until ``done``
        is recorded."""
        # Not dataclasses.replace, which takes three times as long, at each step.
        return TrainedBatch(self.result, self.skip, self.report, self.checks, source, done, place)
