"""Entries of the zoo: a model or a habit, as users write it, at sizes of choice."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import torchembed
from tests.zoo.batches import clicks
from tests.zoo.sizes import Sizes
from torchembed.tables import table_of

LossFunction = Callable[[Any, Any], Tensor]
ModelClass = TypeVar("ModelClass", bound=Callable[[Sizes], nn.Module])


def _nothing(*_: object) -> None:
    pass


@dataclasses.dataclass(kw_only=True)
class Case:
    """A model with what trains it, and what the training loop does around each step.

    Attributes:
        model: called as ``model(dense, sparse)``, or as ``model(batch)`` where ``loss_fn`` is None.
        optimizers: of all its parameters.
        loss_fn: None where the model computes its loss.
        autocast: the dtype of ``torch.autocast``; None without.
        before_step: called with the number of the step.
        after_step: called with the number of the step and its loss, detached.
        kept: further values that the loop computes, such as averages of weights.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss_fn: LossFunction | None = F.binary_cross_entropy_with_logits
    autocast: torch.dtype | None = None
    before_step: Callable[[int], object] = _nothing
    after_step: Callable[[int, Tensor], object] = _nothing
    kept: Callable[[], dict[str, Tensor]] = dict

    def state(self) -> dict[str, Tensor]:
        """Copies of all that training changes: parameters, buffers, what the loop keeps; of a
        table that is divided over ranks what this one holds."""
        found = {**self.model.state_dict(), **self.kept()}
        return {name: _copy(tensor) for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _copy(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    if isinstance(held, DTensor):
        held = held.to_local()
    return held.to_dense() if held.is_sparse else held.clone()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the zoo.

    Attributes:
        family: of the entries that belong together.
        name: of this one.
        make: its case; the same for the same sizes and seed of torch's generator.
        batches: as many batches as asked for, of these sizes.
    """

    family: str
    name: str
    make: Callable[[Sizes], Case]
    batches: Callable[[Sizes, int], list[Any]] = clicks


class Family:
    """Entries that belong together, by decorators of what makes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: list[Entry] = []

    def habit(
        self, name: str, batches: Callable[[Sizes, int], list[Any]] = clicks
    ) -> Callable[[Callable[[Sizes], Case]], Callable[[Sizes], Case]]:
        """Decorates a function that makes the case of an entry."""

        def add(make: Callable[[Sizes], Case]) -> Callable[[Sizes], Case]:
            entry = Entry(family=self.name, name=name, make=make, batches=batches)
            self.entries.append(entry)
            return make

        return add

    def model(
        self,
        name: str,
        batches: Callable[[Sizes, int], list[Any]] = clicks,
        *,
        computes_loss: bool = False,
    ) -> Callable[[ModelClass], ModelClass]:
        """Decorates the class of a model, made from sizes and trained by one optimizer."""

        def add(model_class: ModelClass) -> ModelClass:
            def make(sizes: Sizes) -> Case:
                model = model_class(sizes)
                loss_fn = None if computes_loss else F.binary_cross_entropy_with_logits
                return Case(model=model, optimizers=[adagrad(model)], loss_fn=loss_fn)

            self.habit(name, batches)(make)
            return model_class

        return add


Place = Callable[[nn.Module], object]
_placing: list[tuple[Place, "weakref.WeakSet[nn.Module]"]] = []
"""The function that places models now, and those that it has placed."""


@contextlib.contextmanager
def placing(place: Place) -> Iterator[None]:
    """A context in which ``place`` is called with each model before its optimizers are made."""
    _placing.append((place, weakref.WeakSet()))
    try:
        yield
    finally:
        _placing.pop()


def placed(model: nn.Module) -> nn.Module:
    """``model``, whose optimizers are made next: sharded where ranks train it."""
    for place, done in _placing:
        if model not in done:
            place(model)
            done.add(model)
    return model


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of tables, and the dense parameters, of a model that is trained as it is now."""
    placed(model)
    parameters = list(model.parameters())
    tables = [p for p in parameters if table_of(p) is not None]
    return tables, [p for p in parameters if table_of(p) is None]


def adagrad(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """One optimizer of tables and dense parameters."""
    return torchembed.optim.Adagrad.with_dense(placed(model).parameters(), lr=lr)


def beside_tables(
    model: nn.Module, dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """A fused optimizer of the tables, and the one that ``dense`` makes for the rest."""
    tables, others = parts(model)
    return [torchembed.optim.Adagrad(tables, lr=0.05), dense(others)]
