"""What an entry of the zoo is: a model or a habit, as users write it, at sizes of choice."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.zoo.batches import clicks
from tests.zoo.sizes import Sizes
from torchembed.tables import table_of

LossFunction = Callable[[Tensor, Tensor], Tensor]
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
        """Copies of all that training changes: parameters, buffers, what the loop keeps."""
        found = {**self.model.state_dict(), **self.kept()}
        return {
            name: tensor.detach().to_dense() if tensor.is_sparse else tensor.detach().clone()
            for name, tensor in found.items()
            if isinstance(tensor, Tensor)
        }


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


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of tables, and the dense parameters."""
    parameters = list(model.parameters())
    tables = [p for p in parameters if table_of(p) is not None]
    return tables, [p for p in parameters if table_of(p) is None]


def adagrad(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """One optimizer of tables and dense parameters."""
    return torchembed.optim.Adagrad.with_dense(model.parameters(), lr=lr)


def beside_tables(
    model: nn.Module, dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """A fused optimizer of the tables, and the one that ``dense`` makes for the rest."""
    tables, others = parts(model)
    return [torchembed.optim.Adagrad(tables, lr=0.05), dense(others)]
