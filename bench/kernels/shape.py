"""Shapes of lookups, batches for them, and what looking them up and updating rows must give."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.data.workload import ADAM, ROWWISE_ADAGRAD, SGD, Rule
from torchembed.core.types import Pooling
from torchembed.data.skewed_ids import skewed_ids

_UNIT = 2.0**-24
"""The unit roundoff of float32, in which both libraries compute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables of one form, with one feature each, and a batch's form."""

    dim: int = 64
    dtype: torch.dtype = torch.float32
    rule: Rule = ROWWISE_ADAGRAD
    batch_size: int = 4096
    hotness: int = 10
    """Ids a bag; the mean of them where ``is_jagged``."""
    is_jagged: bool = False
    """Whether bags hold any number of ids from none to twice ``hotness``, each as often."""
    is_weighted: bool = False
    pooling: Pooling | None = Pooling.SUM
    """None looks up a vector for each id."""
    num_tables: int = 16
    num_rows: int = 1_000_000
    """Rows of each table."""

    @property
    def name(self) -> str:
        """The settings in words, other than the optimizer."""
        pooling = "unpooled" if self.pooling is None else self.pooling.value
        length = f"jagged {self.hotness}" if self.is_jagged else f"fixed {self.hotness}"
        words = [f"dim {self.dim}", str(self.dtype).removeprefix("torch."), length]
        words += [f"batch {self.batch_size}", pooling, *["weighted"] * self.is_weighted]
        return ", ".join(words)


class ShapeBatch(NamedTuple):
    """One batch of a shape, feature-major, and the gradient of what it looks up."""

    ids: Tensor
    """int64 ``[L]``."""
    lengths: Tensor
    """int64 ``[num_tables, batch_size]``."""
    weights: Tensor | None
    """float32 ``[L]``."""
    grad: Tensor
    """float32 ``[batch_size, num_tables * dim]``, ``[L, dim]`` where nothing is pooled."""

    @property
    def offsets(self) -> Tensor:
        """int64 ``[num_tables * batch_size + 1]``."""
        return torch.nn.functional.pad(self.lengths.flatten().cumsum(0), (1, 0))

    @property
    def num_ids(self) -> list[int]:
        """Number of ids of each feature."""
        return self.lengths.sum(1).tolist()


@functools.cache
def _zipf_ids(table: int, num_rows: int, num_ids: int, number: int) -> Tensor:
    return skewed_ids(num_rows, num_ids, seed=table, first=number * num_ids)


def make_shape_batch(shape: Shape, number: int, device: torch.device) -> ShapeBatch:
    """The batch of that ``number``: of all, each table has the same hot ids, by Zipf's law with
    the exponent 1.05."""
    generator = torch.Generator().manual_seed(number)
    bags = (shape.num_tables, shape.batch_size)
    lengths = torch.full(bags, shape.hotness)
    if shape.is_jagged:
        lengths = torch.randint(0, 2 * shape.hotness + 1, bags, generator=generator)
    # Drawn for the most ids that bags may hold, so that shapes share what is drawn.
    most = shape.batch_size * shape.hotness * (2 if shape.is_jagged else 1)
    ids = [
        _zipf_ids(table, shape.num_rows, most, number)[: int(num_ids)]
        for table, num_ids in enumerate(lengths.sum(1))
    ]
    num_ids = int(lengths.sum())
    weights = torch.rand(num_ids, generator=generator) + 0.5 if shape.is_weighted else None
    columns = shape.num_tables * shape.dim
    size = (num_ids, shape.dim) if shape.pooling is None else (shape.batch_size, columns)
    on_device = torch.Generator(device).manual_seed(number)
    return ShapeBatch(
        torch.cat(ids).to(device),
        lengths.to(device),
        None if weights is None else weights.to(device),
        torch.randn(size, generator=on_device, device=device),
    )


class Expected(NamedTuple):
    """The result of a batch from given rows, in float64, and how far rounding may be off."""

    value: Tensor
    limit: Tensor


def excess(found: Tensor, expected: Expected) -> float:
    """The largest error over its limit; 1 at most is right."""
    error = (found.double() - expected.value).abs()
    parts = torch.where(error == 0, 0.0, error / expected.limit).nan_to_num(nan=torch.inf)
    return float(parts.max())


class _Positions(NamedTuple):
    """The places that the ids of a batch belong to."""

    bags: Tensor
    """int64 ``[L]``: the vector, in the order of the gradient's rows, that an id is a part of."""
    scales: Tensor
    """float64 ``[L, 1]``: the factor of its row in it."""
    rows: Tensor
    """int64 ``[L]``: its row, counted over all tables."""


def _positions(shape: Shape, batch: ShapeBatch) -> _Positions:
    device, lengths = batch.ids.device, batch.lengths.flatten()
    tables = torch.arange(shape.num_tables, device=device).repeat_interleave(batch.lengths.sum(1))
    rows = batch.ids + tables * shape.num_rows
    if shape.pooling is None:
        bags = torch.arange(batch.ids.numel(), device=device)
        return _Positions(bags, torch.ones(1, 1, dtype=torch.float64, device=device), rows)
    numbers = torch.arange(lengths.numel(), device=device).repeat_interleave(lengths)
    bags = numbers % shape.batch_size * shape.num_tables + numbers // shape.batch_size
    scales = torch.ones(rows.numel(), dtype=torch.float64, device=device)
    if batch.weights is not None:
        scales *= batch.weights
    if shape.pooling is Pooling.MEAN:
        scales /= lengths[numbers]
    return _Positions(bags, scales.unsqueeze(1), rows)


def _rows_of(tables: Sequence[Tensor], rows: Tensor, num_rows: int) -> Tensor:
    """float64 ``[n, dim]``: ``rows``, counted over all ``tables``."""
    found = torch.empty(rows.numel(), tables[0].shape[1], dtype=torch.float64, device=rows.device)
    for table, weight in enumerate(tables):
        mask = rows // num_rows == table
        found[mask] = weight.detach()[rows[mask] - table * num_rows].double()
    return found


def expected_vectors(shape: Shape, batch: ShapeBatch, tables: Sequence[Tensor]) -> Expected:
    """The result of the lookup of ``batch`` in ``tables``, ``[num_rows, dim]`` each, in the form
    of the batch's gradient. Vectors are float32."""
    bags, scales, rows = _positions(shape, batch)
    parts = _rows_of(tables, rows, shape.num_rows)
    if shape.pooling is None:
        return Expected(parts, torch.zeros_like(parts))
    parts *= scales
    value = parts.new_zeros(shape.num_tables * shape.batch_size, shape.dim)
    value.index_add_(0, bags, parts)
    sizes = torch.zeros_like(value).index_add_(0, bags, parts.abs_())
    # A rounding for each sum, and one each for a product and a quotient.
    num_roundings = batch.lengths.t().reshape(-1, 1) + 2
    return Expected(*(t.view_as(batch.grad) for t in (value, sizes * num_roundings * _UNIT)))


class ExpectedRows(NamedTuple):
    """Rows that a step changes."""

    rows: Tensor
    """int64 ``[U]``, counted over all tables."""
    values: Expected
    """``[U, dim]``."""

    def found(self, tables: Sequence[Tensor]) -> Tensor:
        """float64 ``[U, dim]``: the rows of ``tables``."""
        return _rows_of(tables, self.rows, tables[0].shape[0])


def expected_rows(shape: Shape, batch: ShapeBatch, tables: Sequence[Tensor]) -> ExpectedRows:
    """The rows of ``tables`` that ``batch`` looks up, as the first step of the shape's rule must
    leave them.

    The limit is first order in the unit roundoff: that of the sum of a row's gradients, as far as
    it moves the step, and that of the step itself; 16-bit rows are then rounded up or down.
    """
    bags, scales, rows = _positions(shape, batch)
    unique, slots, counts = rows.unique(return_inverse=True, return_counts=True)
    parts = batch.grad.view(-1, shape.dim)[bags].double().mul_(scales)
    gradient = parts.new_zeros(unique.numel(), shape.dim).index_add_(0, slots, parts)
    sizes = torch.zeros_like(gradient).index_add_(0, slots, parts.abs_())
    gradient_limit = sizes * (counts.unsqueeze(1) + 2) * _UNIT
    change, change_limit = _change(shape.rule, gradient, gradient_limit)
    value = _rows_of(tables, unique, shape.num_rows).sub_(change)
    # Of the tables, since a library may lack the shape's.
    dtype = tables[0].dtype
    step = _UNIT if dtype == torch.float32 else torch.finfo(dtype).eps
    # The smallest positive number of float16 is the distance of the smallest numbers.
    limit = change_limit + value.abs() * step + torch.finfo(dtype).smallest_normal * step
    return ExpectedRows(unique, Expected(value, limit))


def _change(rule: Rule, gradient: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The difference that the first step makes, and how far it may be off where ``gradient`` is
    off by ``limit``."""
    num_roundings = 8
    """At most, of the arithmetic of a step."""
    if rule == SGD:
        change, moved = rule.lr * gradient, rule.lr * limit
    elif rule == ADAM:
        beta1, beta2 = rule.betas
        lr = rule.lr * (1 - beta2) ** 0.5 / (1 - beta1)
        change = lr * (1 - beta1) * gradient / ((1 - beta2) ** 0.5 * gradient.abs() + rule.eps)
        moved = lr * (1 - beta1) / rule.eps * limit
        # 1 - beta has the rounding of beta, which is that much larger a part of it.
        num_roundings += 2 / (1 - beta1) + 2 / (1 - beta2)
    else:
        squares = gradient.square()
        if rule == ROWWISE_ADAGRAD:
            squares = squares.mean(dim=1, keepdim=True)
            num_roundings += gradient.shape[1]
        root = (rule.initial_accumulator + squares).sqrt_()
        change, moved = rule.lr * gradient / (root + rule.eps), rule.lr * limit / root
        if rule == ROWWISE_ADAGRAD:
            moved += change.abs() * limit.square().mean(dim=1, keepdim=True).sqrt_() / root
    return change, moved + change.abs() * num_roundings * _UNIT


def floor_bytes(shape: Shape, batches: Sequence[ShapeBatch]) -> tuple[float, float]:
    """Bytes that the forward must move, and those of forward, backward and update; means over
    ``batches``: ids and each distinct row read once, vectors written, their gradient read, and
    distinct rows and their state read and written."""
    forward = in_all = 0.0
    for batch in batches:
        rows = _positions(shape, batch).rows.unique().numel()
        per_id = 8 + 4 * shape.is_weighted
        row_bytes = shape.dim * shape.dtype.itemsize
        state_bytes = {"SGD": 0, "row-wise Adagrad": 4, "Adam": 8 * shape.dim}
        of_lookup = batch.ids.numel() * per_id + rows * row_bytes + batch.grad.nbytes
        forward += of_lookup
        state = state_bytes.get(shape.rule.name, 4 * shape.dim)
        in_all += of_lookup + batch.grad.nbytes + 2 * rows * (row_bytes + state)
    return forward / len(batches), in_all / len(batches)
