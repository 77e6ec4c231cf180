"""The result of a step, which outlives the memory that the step has written it to."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchembed.core.trees import Tree, map_tensors
from torchembed.step.batches.batch_layout import dense_tensors, num_samples, with_dense_tensors

if TYPE_CHECKING:
    from torchembed.step.stages import StepKind


class StepOutputs(NamedTuple):
    """The tensors that a step gives, detached from autograd."""

    loss: Tensor
    """``[]``, this rank's."""
    output: Tree
    """The model's, a tree of tensors: logits, where there is a loss function."""
    batch: Tree
    """The batch that was trained, as the model left it; jagged features are the caller's own,
    on his device."""


@dataclasses.dataclass
class ResultMemory:
    """Memory that steps write their outputs to, each over those of the step before."""

    num_steps: int = 0
    """Counts the steps."""


class ResultPlace:
    """The place of the results of one repeated step.

    Attributes:
        memory: shared with other steps.
        is_replayed: whether the step is a replay, which writes loss and output to where they were
            before; others have only the batch in memory of further steps.
        holds_features: whether the batch's sparse features lie there, too.
    """

    def __init__(self, memory: ResultMemory, *, holds_features: bool) -> None:
        self.memory, self.holds_features = memory, holds_features
        self.is_replayed = False
        self._held: Callable[[], StepResult | None] = _nothing
        """The last result, until nobody holds it."""

    def begin_step(self) -> None:
        """Note that the step is about to be repeated; the loss of the last one is copied where
        somebody holds its result."""
        self.memory.num_steps += 1
        result = self._held()
        if result is not None:
            result.keep_loss()
        self._held = _nothing

    def hold(self, result: "StepResult") -> None:
        """Note that the loss of ``result`` lies here."""
        self._held = weakref.ref(result)


def _nothing() -> None:
    return None


class StepResult:
    """The result of a step, on the device and detached from autograd. Nothing waits for it.

    What is read of it stays as it is: steps write to memory that later ones write to as well, so
    that loss, output and batch are copied when they are read first. The loss may be read at any
    time.

    Args:
        outputs: of the step.
        kind: of the step.
        place: where ``outputs`` lie; None for memory of their own.

    Attributes:
        kind: the form of the step: captured and how, or eager and why.
    """

    __slots__ = ("__weakref__", "_found", "_outputs", "_place", "_step", "kind")

    def __init__(
        self, outputs: StepOutputs, kind: "StepKind", place: ResultPlace | None = None
    ) -> None:
        self.kind = kind
        self._outputs, self._place = outputs, place
        self._found: dict[str, Tree] = {}
        """Copies of what was read."""
        self._step = 0
        """Number of the step among those that write to the memory."""
        if place is not None:
            self._step = place.memory.num_steps
            if place.is_replayed:
                place.hold(self)

    @property
    def loss(self) -> Tensor:
        """``[]``, this rank's."""
        if "loss" not in self._found:
            self.keep_loss()
        return self._found["loss"]

    @property
    def output(self) -> Tree:
        """The model's, a tree of tensors: logits, where there is a loss function.

        Raises:
            RuntimeError: as :attr:`batch`.
        """
        if "output" not in self._found:
            self._found["output"] = self._copied("output", self._outputs.output)
        return self._found["output"]

    @property
    def batch(self) -> Tree:
        """The batch that was trained, as the model left it; jagged features are the caller's own,
        on his device.

        Raises:
            RuntimeError: if it is read first when a further step has written to its memory.
        """
        if "batch" not in self._found:
            self._found["batch"] = self._copied("batch", self._outputs.batch)
        return self._found["batch"]

    @property
    def num_samples(self) -> int:
        """The number of samples of this rank's batch."""
        return num_samples(self._outputs.batch)

    def peek_loss(self) -> Tensor:
        """The loss, and no copy of it: the next step but one may overwrite it."""
        return self._found.get("loss", self._outputs.loss)

    def keep_loss(self) -> None:
        """Copy the loss, unless that was done, from memory that steps write to."""
        if "loss" not in self._found:
            place, loss = self._place, self._outputs.loss
            is_kept = place is None or not place.is_replayed
            self._found["loss"] = loss if is_kept else loss.clone()

    def _copied(self, name: str, tree: Tree) -> Tree:
        place = self._place
        if place is None:
            return tree
        if place.memory.num_steps != self._step:
            raise RuntimeError(
                f"result.{name} must be read before the next step, which has written to its "
                "memory; read it right after progress(), and keep what that gives"
            )
        if name == "batch" and not place.holds_features:
            return with_dense_tensors(tree, map(torch.clone, dense_tensors(tree)))
        return map_tensors(torch.clone, tree)
