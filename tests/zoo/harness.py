"""A plain loop and a pipeline from the same weights over the same batches, and how they compare.

On several ranks both train one sharded model, and each rank takes its own part of the batches.
"""

import contextlib
import dataclasses
import enum
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.tolerance import NUDGE_UNITS
from tests.zoo.entries import Case, Entry, placing
from tests.zoo.sizes import Sizes
from torchembed.core import ranks
from torchembed.step.stages import StepForm, StepKind
from torchembed.training import TrainPipeline

NUM_STEPS = 12


class Kind(enum.Enum):
    """How a pipeline trained an entry, against the plain loop; from the best to the worst."""

    CAPTURED = "equal, captured"
    ROUNDED = "equal but for roundings, captured"
    SAID = "equal, eager, and said why"
    UNSAID = "equal, eager, without a word"
    UNREPEATABLE = "different, as two plain loops are"
    DIFFERENT_SAID = "different, though it said something"
    DIFFERENT = "different, without a word"
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
    """The case of ``entry``, its model sharded where there are several ranks; the same at each
    call."""
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if ranks.world_size() > 1:
            stack.enter_context(placing(_sharded))
        stack.enter_context(sizes.device)
        case = entry.make(sizes)
    torch.manual_seed(1 + ranks.rank())
    return case


def _sharded(model: nn.Module) -> None:
    device = next(model.parameters()).device.type
    with torch.device("cpu"):  # and not the one that cases are made on
        mesh = init_device_mesh(device, (ranks.world_size(),))
        torchembed.shard_embeddings(model, mesh)


def batches_of(entry: Entry, sizes: Sizes, num_steps: int = NUM_STEPS) -> list[Any]:
    """This rank's batches, one for each step."""
    return entry.batches(sizes, num_steps * ranks.world_size())[ranks.rank() :: ranks.world_size()]


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
            output = case.model(batch.dense, batch.sparse)
            if isinstance(output, Tensor):
                output = output.reshape(len(batch.labels))
            loss = case.loss_fn(output, batch.labels)
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


def by_pipeline(case: Case, batches: Sequence[Any]) -> tuple[Trained, StepKind]:
    """Train by a pipeline that captures; also the kind of its last step."""
    losses, iterator, kind = [], iter(batches), None
    with TrainPipeline(
        case.model, case.loss_fn, case.optimizers, autocast=case.autocast, capture=True
    ) as pipeline:
        for number in range(len(batches)):
            case.before_step(number)
            result = pipeline.progress(iterator)
            losses.append(result.loss.clone())
            case.after_step(number, result.loss)
            kind = result.kind
    assert kind is not None
    return Trained(losses, case.state()), kind


def difference(one: Trained, other: Trained) -> str | None:
    """The first difference of losses and states, and its size; None where they are equal bit for
    bit. NaN equals itself."""
    if one.state.keys() != other.state.keys():
        return f"states have other names: {sorted(one.state.keys() ^ other.state.keys())}"
    of_losses = ((f"the loss of step {n}", loss) for n, loss in enumerate(one.losses))
    tensors = itertools.chain(of_losses, one.state.items())
    others = itertools.chain(other.losses, other.state.values())
    for (name, a), b in zip(tensors, others, strict=True):
        if a.shape != b.shape:
            return f"{name} has the shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if not bool(((a == b) | (a.isnan() & b.isnan())).all()):
            return f"{name} differs by {float((a.double() - b.double()).abs().max()):.1e}"
    return None


def _nudge(model: nn.Module) -> None:
    """Change each parameter by ``NUDGE_UNITS`` units of rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + NUDGE_UNITS * torch.finfo(parameter.dtype).eps)


def _within_roundings(found: Trained, expected: Trained, nudged: Trained) -> bool:
    """True where ``found`` and ``expected`` differ by no more than the roundings of their steps
    make them, as the loop whose parameters were nudged shows.

    Sums of differences are compared, and no single ones: where the sign of a gradient turns over,
    an element moves as far after a rounding as after a nudge, which turns over as many more as it
    is larger.
    """

    def of(trained: Trained) -> list[Tensor]:
        return [torch.stack(trained.losses).double(), *(t.double() for t in trained.state.values())]

    num_steps = len(expected.losses)
    for a, b, moved in zip(of(found), of(expected), of(nudged), strict=True):
        size, drift = b.abs().sum(), (moved - b).abs().sum() / NUDGE_UNITS
        if not (a - b).abs().sum() <= num_steps * drift + torch.finfo(torch.float32).eps * size:
            return False
    return True


def outcome_of(entry: Entry, sizes: Sizes, num_steps: int = NUM_STEPS) -> Outcome:
    """Train ``entry`` both ways and compare.

    Where they differ, a second plain loop tells whether the first one can be repeated: dropout of
    cuDNN's LSTM draws from a state that no seed sets, and some of torch's sums on GPUs have no
    order. Padded steps add zeros to the sums over a batch's ids, in whatever order torch then adds:
    they may differ by roundings, whose effect a third loop shows.

    Raises:
        AssertionError: where the plain loop changes no weight, so that equality says nothing.
        Exception: what the plain loop raises.
    """
    case = made(entry, sizes)
    before = [parameter.detach().clone() for parameter in case.model.parameters()]
    with warnings.catch_warnings(record=True) as of_plain_loop:
        warnings.simplefilter("always")
        expected = by_hand(case, batches_of(entry, sizes, num_steps))
    assert not all(map(torch.equal, before, case.model.parameters())), f"{entry.name} is constant"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, kind = by_pipeline(made(entry, sizes), batches_of(entry, sizes, num_steps))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            return Outcome(Kind.RAISES, f"{type(error).__name__}: {_first_line(error)}")
    known = {_first_line(warning.message) for warning in of_plain_loop}
    said = [_first_line(warning.message) for warning in caught]
    said = [line for line in said if line not in known]
    if kind.why is not None and not said:
        said = [str(kind)]  # which the pipeline logs
    words = "; ".join(dict.fromkeys(said))
    differs = difference(found, expected)
    if ranks.any_rank(differs is not None):
        again = by_hand(made(entry, sizes), batches_of(entry, sizes, num_steps))
        of_plain = difference(again, expected)
        if ranks.any_rank(of_plain is not None):
            return Outcome(Kind.UNREPEATABLE, f"{differs}; between plain loops: {of_plain}")
        if kind.form is StepForm.PADDED:
            case = made(entry, sizes)
            _nudge(case.model)
            nudged = by_hand(case, batches_of(entry, sizes, num_steps))
            if _within_roundings(found, expected, nudged):
                return Outcome(Kind.ROUNDED, words)
    if differs is not None:
        kind_of_difference = Kind.DIFFERENT_SAID if words else Kind.DIFFERENT
        return Outcome(kind_of_difference, "; ".join(filter(None, (differs, words))))
    if kind.form in (StepForm.GRAPH, StepForm.PADDED):
        return Outcome(Kind.CAPTURED, words)
    return Outcome(Kind.SAID if words else Kind.UNSAID, words)


def joint(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of the ranks' outcomes, with what the ranks say, each once."""
    kind = max((outcome.kind for outcome in outcomes), key=list(Kind).index)
    return Outcome(kind, words_of_ranks([outcome.words for outcome in outcomes]))


def words_of_ranks(words: Sequence[str]) -> str:
    """The words of each rank, with the numbers of the ranks where not all say it."""
    said = {text: [rank for rank, of in enumerate(words) if of == text] for text in words if text}
    return " | ".join(
        text if len(of) == len(words) else f"rank {', '.join(map(str, of))}: {text}"
        for text, of in said.items()
    )


def _first_line(message: Warning | str | Exception) -> str:
    return (str(message).splitlines() or [""])[0]
