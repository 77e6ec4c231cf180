"""Batches of ids for DLRM-like tables, and what looking them up and updating must give."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchembed.data.skewed_ids import skewed_ids

EXPONENTS = {"uniform": 0.0, "zipf": 1.05}
"""Exponents of the laws by which ids are drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables of one dim, one feature each, and how their ids are drawn."""

    dim: int
    num_rows: tuple[int, ...]
    """Rows of each table."""
    hotness: tuple[int, ...]
    """Ids a bag of each feature."""
    batch_size: int
    ids: str
    """``"uniform"``, or ``"zipf"`` with the hot ids scattered over the table."""

    @property
    def num_ids(self) -> int:
        """Ids of one batch."""
        return sum(self.hotness) * self.batch_size


class Batch(NamedTuple):
    """One batch, and the gradient of what it looks up."""

    ids: list[Tensor]
    """int64 ``[batch_size * hotness]`` of each feature."""
    grad: Tensor
    """float32 ``[batch_size, num_features * dim]``."""


def make_batch(workload: Workload, number: int) -> Batch:
    """The batch of that ``number``: of all, each table has the same hot ids."""
    exponent = EXPONENTS[workload.ids]
    ids = []
    for table, (num_rows, hotness) in enumerate(
        zip(workload.num_rows, workload.hotness, strict=True)
    ):
        count = hotness * workload.batch_size
        first = number * count
        ids.append(skewed_ids(num_rows, count, exponent=exponent, seed=table, first=first))
    generator = torch.Generator().manual_seed(number)
    width = len(ids) * workload.dim
    return Batch(ids, torch.randn(workload.batch_size, width, generator=generator))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer and its numbers, chosen so that a gradient near zero makes a small step: where
    the step is the gradient's sign, rounding alone would decide it."""

    name: str
    lr: float = 0.01
    eps: float = 1e-8
    initial_accumulator: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


SGD = Rule(name="SGD")
ADAGRAD = Rule(name="Adagrad")
ROWWISE_ADAGRAD = Rule(name="row-wise Adagrad")
ADAM = Rule(name="Adam", eps=1e-3)

RULES = (SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)


def true_pooled(weights: Sequence[Tensor], batch: Batch) -> Tensor:
    """The sum of each bag's rows, in float64: ``[batch_size, num_features * dim]``."""
    batch_size = batch.grad.shape[0]
    bags = [
        weight[ids].double().view(batch_size, -1, weight.shape[1]).sum(dim=1)
        for weight, ids in zip(weights, batch.ids, strict=True)
    ]
    return torch.cat(bags, dim=1)


class RowChanges(NamedTuple):
    """Changes of a table's rows in one step."""

    rows: Tensor
    """``[U]``, increasing: the rows that change."""
    changes: Tensor
    """float64 ``[U, dim]``, to be added to them."""


def true_changes(batch: Batch, feature: int, rule: Rule) -> RowChanges:
    """Compute in float64 the changes of ``feature``'s table in the first step of ``rule``."""
    ids = batch.ids[feature]
    batch_size, dim = batch.grad.shape[0], batch.grad.shape[1] // len(batch.ids)
    rows, slots = ids.unique(return_inverse=True)
    of_bags = batch.grad.view(batch_size, -1, dim)[:, feature].double()
    of_ids = of_bags.repeat_interleave(ids.numel() // batch_size, dim=0)
    gradient = torch.zeros(rows.numel(), dim, dtype=torch.float64, device=ids.device)
    gradient.index_add_(0, slots, of_ids)
    square = gradient.square()
    if rule.name == SGD.name:
        step = gradient
    elif rule.name == ADAM.name:
        beta1, beta2 = rule.betas
        root = ((1 - beta2) * square).sqrt() + rule.eps
        step = (1 - beta2) ** 0.5 / (1 - beta1) * (1 - beta1) * gradient / root
    else:
        if rule.name == ROWWISE_ADAGRAD.name:
            square = square.mean(dim=1, keepdim=True)
        step = gradient / ((rule.initial_accumulator + square).sqrt() + rule.eps)
    return RowChanges(rows, -rule.lr * step)


def error_of(found: Tensor, true: Tensor) -> float:
    """The largest difference, as a part of the largest true value."""
    return float((found.double() - true).abs().max() / true.abs().max())
