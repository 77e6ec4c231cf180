"""A plain loop and a pipeline from the same weights over the same batches, and how they compare."""

import dataclasses
import enum
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.zoo.entries import Case, Entry
from tests.zoo.sizes import Sizes
from torchembed.training import TrainPipeline

NUM_STEPS = 12


class Kind(enum.Enum):
    """How a pipeline trained an entry, against the plain loop."""

    CAPTURED = "equal, captured"
    SAID = "equal, eager, and said why"
    UNSAID = "equal, eager, without a word"
    DIFFERENT = "different, without a word"
    DIFFERENT_SAID = "different, though it said something"
    RAISES = "raises"


class Trained(NamedTuple):
    """The losses of a loop, and its state at the end."""

    losses: list[Tensor]
    state: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a pipeline did, and what it said."""

    kind: Kind
    words: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.words}" if self.words else self.kind.value


def made(entry: Entry, sizes: Sizes) -> Case:
    """The case of ``entry``; the same at each call."""
    torch.manual_seed(0)
    with sizes.device:
        case = entry.make(sizes)
    torch.manual_seed(1)
    return case


def plain_step(case: Case, batch: Any) -> Tensor:
    """A step as a loop by hand takes it; the loss, detached."""
    for optimizer in case.optimizers:
        optimizer.zero_grad()
    device = next(case.model.parameters()).device.type
    with torch.autocast(device, case.autocast, enabled=case.autocast is not None):
        if case.loss_fn is None:
            result = case.model(batch)
            loss = result[0] if isinstance(result, tuple) else result
        else:
            logits = case.model(batch.dense, batch.sparse).reshape(len(batch.labels))
            loss = case.loss_fn(logits, batch.labels)
    loss.backward()
    for optimizer in case.optimizers:
        optimizer.step()
    return loss.detach()


def by_hand(case: Case, batches: Sequence[Any]) -> Trained:
    """Train by a plain loop."""
    losses = []
    for number, batch in enumerate(batches):
        case.before_step(number)
        loss = plain_step(case, batch)
        losses.append(loss.clone())
        case.after_step(number, loss)
    return Trained(losses, case.state())


def by_pipeline(case: Case, batches: Sequence[Any]) -> tuple[Trained, bool]:
    """Train by a pipeline that captures; True where it does so to the end."""
    losses, iterator = [], iter(batches)
    with TrainPipeline(
        case.model, case.loss_fn, case.optimizers, autocast=case.autocast, capture=True
    ) as pipeline:
        for number in range(len(batches)):
            case.before_step(number)
            loss = pipeline.progress(iterator).loss
            losses.append(loss.clone())
            case.after_step(number, loss)
        is_captured = pipeline.engine.is_captured
    return Trained(losses, case.state()), is_captured


def are_equal(one: Trained, other: Trained) -> bool:
    """True where losses and states are equal bit for bit; NaN equals itself."""
    if one.state.keys() != other.state.keys():
        return False
    pairs = itertools.chain(
        zip(one.losses, other.losses, strict=True),
        ((tensor, other.state[name]) for name, tensor in one.state.items()),
    )
    return all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in pairs
    )


def outcome_of(entry: Entry, sizes: Sizes, num_steps: int = NUM_STEPS) -> Outcome:
    """Train ``entry`` both ways and compare.

    Raises:
        Exception: what the plain loop raises.
    """
    expected = by_hand(made(entry, sizes), entry.batches(sizes, num_steps))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, is_captured = by_pipeline(made(entry, sizes), entry.batches(sizes, num_steps))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            return Outcome(Kind.RAISES, f"{type(error).__name__}: {_first_line(error)}")
    words = "; ".join(dict.fromkeys(_first_line(warning.message) for warning in caught))
    if not are_equal(found, expected):
        return Outcome(Kind.DIFFERENT_SAID if words else Kind.DIFFERENT, words)
    if is_captured:
        return Outcome(Kind.CAPTURED, words)
    return Outcome(Kind.SAID if words else Kind.UNSAID, words)


def _first_line(message: Warning | str | Exception) -> str:
    return (str(message).splitlines() or [""])[0]
