"""Batches of ids for DLRM-like tables, and what looking them up and updating must give."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ZIPF_EXPONENT = 1.05


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


def _draw_ids(workload: Workload, num_rows: int, count: int, random: np.random.Generator) -> Tensor:
    if workload.ids == "uniform":
        return torch.from_numpy(random.integers(0, num_rows, count))
    weights = np.arange(1, num_rows + 1) ** -ZIPF_EXPONENT
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(count))
    return torch.from_numpy(random.permutation(num_rows)[np.minimum(ranks, num_rows - 1)])


def make_batch(workload: Workload, seed: int) -> Batch:
    """A batch that depends on ``seed`` alone."""
    random = np.random.default_rng(seed)
    ids = [
        _draw_ids(workload, num_rows, hotness * workload.batch_size, random)
        for num_rows, hotness in zip(workload.num_rows, workload.hotness, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
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


def true_updated_rows(weight: Tensor, batch: Batch, feature: int, rule: Rule) -> Tensor:
    """The rows that ``feature`` touches after the first step of ``rule``, in float64, by row."""
    ids = batch.ids[feature]
    batch_size, dim = batch.grad.shape[0], weight.shape[1]
    rows, slots = ids.unique(return_inverse=True)
    of_bags = batch.grad.view(batch_size, -1, dim)[:, feature].double()
    of_ids = of_bags.repeat_interleave(ids.numel() // batch_size, dim=0)
    gradient = torch.zeros(rows.numel(), dim, dtype=torch.float64).index_add_(0, slots, of_ids)
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
    return weight[rows].double() - rule.lr * step


def error_of(found: Tensor, true: Tensor) -> float:
    """The largest difference, as a part of the largest true value."""
    return float((found.double() - true).abs().max() / true.abs().max())
