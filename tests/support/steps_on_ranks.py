"""Batches and losses for steps on ranks, where one rank may have a bad id, and plain training."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchembed
from tests.support.sharded_cases import (
    Case,
    exact_loss_of,
    make_batch,
    make_model,
    make_optimizer,
    whole_rows,
)

NUM_STEPS, BAD_STEP = 9, 4
NO_RANK = 99
MIXED = {"a": "column_wise", "b": "row_wise", "c": "table_wise", "d": "data_parallel"}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module, looks_up: Sequence[str] = ("batch",)) -> None:
        """``looks_up``: the ids of the batch, or some that forward makes of them, or both."""
        super().__init__()
        self.tables, self.looks_up = model.tables, looks_up

    def forward(self, features: torchembed.SparseFeatures) -> Tensor:
        derived = dataclasses.replace(features, values=features.values // 2)
        of_kind = {"batch": features, "derived": derived}
        losses = [exact_loss_of(self.tables(of_kind[kind])) for kind in self.looks_up]
        return torch.stack(losses).sum()


def static_batch(case: Case, rank: int, step: int, bad_rank: int) -> torchembed.SparseFeatures:
    """A batch of as many samples on every step; on the bad step one rank has an id outside its
    table."""
    batch = make_batch(case, rank, step, num_samples=4 - 2 * (rank % 2))
    if (rank, step) == (bad_rank, BAD_STEP):
        batch.values[1] = 2**20
    return batch


def train_plainly(
    case: Case,
    num_ranks: int,
    bad_rank: int,
    device: str = "cpu",
    num_steps: int = NUM_STEPS,
    batch_of: Callable[[Case, int, int, int], torchembed.SparseFeatures] = static_batch,
) -> dict[str, tuple[Any, list[Any]]]:
    """The rows of static tables after :func:`trained_plainly`."""
    return whole_rows(trained_plainly(case, num_ranks, bad_rank, device, num_steps, batch_of))


def trained_plainly(
    case: Case,
    num_ranks: int,
    bad_rank: int,
    device: str = "cpu",
    num_steps: int = NUM_STEPS,
    batch_of: Callable[[Case, int, int, int], torchembed.SparseFeatures] = static_batch,
) -> nn.Module:
    """A model trained in one process on all ranks' batches, but those of the bad step."""
    model = make_model(case, device)
    optimizer = make_optimizer(case, model)
    for step in range(num_steps):
        if step == BAD_STEP and bad_rank < num_ranks:
            continue
        optimizer.zero_grad()
        batches = [batch_of(case, rank, step, NO_RANK).to(device) for rank in range(num_ranks)]
        losses = [exact_loss_of(model.tables(batch)) for batch in batches]
        (torch.stack(losses).sum() / num_ranks).backward()
        optimizer.step()
    return model
