"""Steps of ``rowwise_update`` beside the same steps by the oracle."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support import oracle
from tests.support.bags import random_rows
from tests.support.tolerance import Formula, assert_follows, assert_same_bits
from tests.support.values import normal
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs


def scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows and their gradients on the CPU."""

    rows: Tensor
    gradients: RowGradients

    def each(self, dtype: torch.dtype) -> Tensor:
        """``[L, D]``, the gradient of each position."""
        grad, gradient_rows, scales = self.gradients
        each = grad.to(dtype)
        if gradient_rows is not None:
            each = each[gradient_rows.long()]
        return each if scales is None else each * scales.to(dtype).unsqueeze(1)


def random_batch(
    num_ids: int,
    num_rows: int,
    dim: int,
    seed: int,
    *,
    grad_dtype: torch.dtype = torch.float32,
    scattered: bool = False,
    missing: float = 0.1,
) -> Batch:
    """Skewed rows; ``scattered`` gives positions gradient rows and scales, as pooling does."""
    rows = random_rows(num_ids, num_rows, seed, missing)
    if not scattered:
        return Batch(rows, RowGradients(normal(num_ids, dim, seed=seed, dtype=grad_dtype)))
    num_bags = num_ids // 3 + 1
    gradient_rows = (torch.arange(num_ids) * 7 % num_bags).int()
    grad = normal(num_bags, dim, seed=seed, dtype=grad_dtype)
    return Batch(rows, RowGradients(grad, gradient_rows, normal(num_ids, seed=seed + 1)))


def positions(*rows: int, dim: int = 3) -> Batch:
    return Batch(
        torch.tensor(rows, dtype=torch.int64), RowGradients(normal(len(rows), dim, seed=5))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Several steps of one rule: done by the operation, and by a formula."""

    rule: UpdateRule
    batches: Sequence[Batch]
    num_rows: int
    dim: int
    weight_dtype: torch.dtype = torch.float32
    lr: float = 0.1
    multiplier: float = 1.0

    def initial(self, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight = normal(self.num_rows, self.dim, seed=9, dtype=self.weight_dtype, device=device)
        shape = self.rule.state_shape(self.num_rows, self.dim)
        states = tuple(torch.zeros(shape, device=device) for _ in range(self.rule.num_states))
        return weight, states

    def results(self, device: torch.device) -> list[Tensor]:
        """The weight and the states after all batches, from the operation."""
        weight, states = self.initial(device)
        for count, batch in enumerate(self.batches, start=1):
            rows = batch.rows.to(device)
            gradients = RowGradients(*(t if t is None else t.to(device) for t in batch.gradients))
            rowwise_update(
                weight,
                states,
                find_runs(rows, self.num_rows),
                gradients,
                self.rule,
                scalar(self.lr, device),
                step=scalar(count, device),
                grad_multiplier=scalar(self.multiplier, device),
            )
        return [weight, *states]

    def formula(self, result: int) -> Formula:
        """The weight (0) or a state (1, 2) after all batches, from the oracle."""
        lr = torch.tensor(self.lr).item()
        multiplier = torch.tensor(self.multiplier).item()

        def formula(dtype: torch.dtype) -> Tensor:
            options = dataclasses.asdict(self.rule)
            optimizer = oracle.RowwiseOptimizer(
                self.initial(torch.device("cpu"))[0],
                options.pop("kind").name.lower(),
                dtype,
                **options,
            )
            for count, batch in enumerate(self.batches, start=1):
                optimizer.step(batch.rows, batch.each(dtype), lr, count, multiplier)
                if dtype == torch.float32:
                    optimizer.round_weight()
            return [optimizer.weight, *optimizer.states][result]

        return formula

    def check(self, device: torch.device) -> None:
        """Weight and state follow the formula, and rows that no batch has keep their bits."""
        results = self.results(device)
        initial_weight, initial_states = self.initial(device)
        touched = torch.cat([batch.rows for batch in self.batches])
        untouched = torch.ones(self.num_rows, dtype=torch.bool)
        untouched[touched[touched >= 0]] = False
        untouched = untouched.to(device)
        for index, initial in enumerate((initial_weight, *initial_states)):
            assert_follows(results[index], self.formula(index))
            assert_same_bits(results[index][untouched], initial[untouched])
