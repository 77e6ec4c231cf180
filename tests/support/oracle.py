"""The operations as plain formulas on the CPU, one bag or row at a time, in a dtype of choice.

They share no code with ``torchembed``, and autograd differentiates them: gradients need no formula
of their own. Called with float64 they are the truth; with float32, what eager torch would give.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from tests.support.bags import Bags


def pooled_lookup(
    weight: Tensor, bags: Bags, *, per_id_weights: Tensor | None = None, mean: bool = False
) -> Tensor:
    """``[B, F, D]``, in the dtype of ``weight``."""
    vectors = sequence_lookup(weight, bags.rows)
    if per_id_weights is not None:
        vectors = vectors * per_id_weights.unsqueeze(1)
    remaining = list(vectors.unbind(0))
    zero = 0 * weight.sum(0)
    pooled = []
    for length in bags.lengths:
        bag, remaining = remaining[:length], remaining[length:]
        # One after the other: torch.sum adds pairwise, whose float32 error is smaller.
        total = functools.reduce(torch.add, bag, zero)
        pooled.append(total / length if mean and length else total)
    assert bags.rows.numel() == 0 or (bags.rows[sum(bags.lengths) :] < 0).all()
    if not pooled:
        return zero.expand(bags.batch_size, bags.num_features, -1)
    by_feature = torch.stack(pooled).view(bags.num_features, bags.batch_size, -1)
    return by_feature.transpose(0, 1)


def sequence_lookup(weight: Tensor, rows: Tensor) -> Tensor:
    """``[L, D]``, in the dtype of ``weight``; zeros for rows of -1."""
    padded = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    return padded[rows.cpu().long()]


class RowwiseOptimizer:
    """A table and its optimizer state; each step sums the gradients of each row and updates it.

    Arithmetic and state are in ``dtype``; :meth:`round_weight` rounds the weight as a 16-bit table
    is rounded after a step.
    """

    def __init__(
        self,
        weight: Tensor,
        kind: str,
        dtype: torch.dtype,
        *,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        max_gradient: float = 0.0,
    ) -> None:
        self.storage, self.dtype, self.kind = weight.dtype, dtype, kind
        self.weight = weight.detach().cpu().to(dtype).clone()
        self.eps, self.beta1, self.beta2 = eps, beta1, beta2
        self.weight_decay, self.max_gradient = weight_decay, max_gradient
        row_wise = kind == "rowwise_adagrad"
        state_shape = self.weight.shape[:1] if row_wise else self.weight.shape
        self.states = [torch.zeros(state_shape, dtype=dtype) for _ in range(2)]

    def step(
        self, rows: Tensor, gradients: Tensor, lr: float, count: int, multiplier: float = 1.0
    ) -> None:
        """One step over ``rows [L]`` with ``gradients [L, D]``; rows of -1 have none."""
        sums: dict[int, Tensor] = {}
        for row, gradient in zip(rows.tolist(), gradients.cpu().to(self.dtype), strict=True):
            if row >= 0:
                sums[row] = sums[row] + gradient if row in sums else gradient
        for row, total in sums.items():
            old = self.weight[row]
            gradient = total * multiplier
            if self.max_gradient > 0:
                gradient = gradient.clamp(-self.max_gradient, self.max_gradient)
            gradient = gradient + self.weight_decay * old
            new = old - lr * self._direction(row, gradient, count)
            self.weight[row] = new

    def round_weight(self) -> None:
        """Round the weight to its storage dtype, to nearest."""
        self.weight = self.weight.to(self.storage).to(self.dtype)

    def _direction(self, row: int, gradient: Tensor, count: int) -> Tensor:
        first, second = self.states
        if self.kind == "sgd":
            return gradient
        if self.kind in ("adagrad", "rowwise_adagrad"):
            square = gradient**2
            row_wise = self.kind == "rowwise_adagrad"
            first[row] += square.sum() / max(square.numel(), 1) if row_wise else square
            return gradient / (first[row].sqrt() + self.eps)
        assert self.kind == "adam"
        first[row] = self.beta1 * first[row] + (1 - self.beta1) * gradient
        second[row] = self.beta2 * second[row] + (1 - self.beta2) * gradient**2
        correction = math.sqrt(1 - self.beta2**count) / (1 - self.beta1**count)
        return correction * first[row] / (second[row].sqrt() + self.eps)


def linearize_ids(
    values: Sequence[int],
    lengths: Sequence[int],
    batch_size: int,
    first_rows: Sequence[int],
    num_rows: Sequence[int],
    *,
    clamp: bool,
) -> tuple[list[int], int | None]:
    """Rows of the group's weight, and the first position of a bad id, in Python integers."""
    features = [bag // batch_size for bag, length in enumerate(lengths) for _ in range(length)]
    rows = []
    first_bad = None
    for position, (value, feature) in enumerate(zip(values, features, strict=True)):
        limit = num_rows[feature]
        nearest = min(max(value, 0), limit - 1)
        if nearest != value and first_bad is None:
            first_bad = position
        exists = limit > 0 and (clamp or nearest == value)
        rows.append(first_rows[feature] + nearest if exists else -1)
    return rows, first_bad


def find_runs(rows: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The distinct rows, increasing, and the positions of each; rows of -1 are left out."""
    groups: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        if row >= 0:
            groups.setdefault(row, []).append(position)
    unique = sorted(groups)
    return unique, [groups[row] for row in unique]


def chunk_runs(starts: Sequence[int], num_ids: int) -> list[int]:
    """The run of the whole chunk that starts among each 32 of ``num_ids`` sorted positions, -1
    where none does; run u is ``[starts[u], starts[u + 1])``."""
    runs = [-1] * (num_ids // 32)
    for run, (start, end) in enumerate(itertools.pairwise(starts)):
        for chunk in range(start, end - 31, 32):
            runs[chunk // 32] = run
    return runs


_WORD = (1 << 64) - 1


def random_bits(key: int, counter: int) -> int:
    """64 bits of SplitMix64, unsigned, for a key and a counter of any sign."""
    value = (key + (counter + 1) * 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def stochastic_round(value: float, dtype: torch.dtype, bits: int) -> float:
    """``value`` rounded away from zero where the bits exceed the way that is left to go, in exact
    fractions; to nearest where the neighbour that they choose is beyond the largest float16."""
    num_bits, smallest_step = {
        torch.bfloat16: (16, Fraction(2) ** (-126 - 7)),
        torch.float16: (13, Fraction(2) ** (-14 - 10)),
    }[dtype]
    if not math.isfinite(value):
        return value
    size = abs(Fraction(value))
    precision = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    exponent = math.frexp(value)[1]
    step = max(Fraction(2) ** (exponent - precision), smallest_step)
    below = size // step
    fraction = size / step - below
    away = fraction + Fraction(bits >> (64 - num_bits), 1 << num_bits) >= 1
    rounded = float((below + away) * step)
    if dtype == torch.float16 and rounded > torch.finfo(dtype).max:
        return torch.tensor(value).to(dtype).item()
    return math.copysign(rounded, value)
