"""The same tables as ours and as ``torch.nn.EmbeddingBag``s, trained on the same batches."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.clicks import Clicks, random_clicks
from tests.support.tolerance import Formula, assert_follows
from tests.support.values import normal
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig

NAMES = ("a", "b", "c")
ROWS = dict(zip(NAMES, (7, 5, 6), strict=True))
DIMS = dict(zip(NAMES, (4, 4, 3), strict=True))
TABLES = [
    EmbeddingBagConfig(
        name=name, num_embeddings=ROWS[name], embedding_dim=DIMS[name], feature_names=(name,)
    )
    for name in NAMES
]
NUM_STEPS = 6


def make(
    device: torch.device | str, dtype: torch.dtype = torch.float32, **settings: Any
) -> EmbeddingBagCollection:
    """Two groups: a with b, and c."""
    tables = [dataclasses.replace(table, dtype=dtype) for table in TABLES]
    return EmbeddingBagCollection(tables, device=device, **settings)


def batch(step: int, *, every_row: bool = False) -> Clicks:
    """Bags with repeated ids, also across bags; the last row is not touched but with ``every_row``,
    which puts all of them into the first bags."""
    clicks = random_clicks({name: ROWS[name] - 1 for name in NAMES}, 5, seed=step)
    if every_row:
        for name in NAMES:
            clicks.bags[name][0] = list(range(ROWS[name]))
    return clicks


def output_gradient(step: int) -> Tensor:
    """``[B, sum of dims]``."""
    return normal(5, sum(DIMS.values()), seed=100 + step)


def backward(module: nn.Module, step: int, scale: float = 1.0, *, every_row: bool = False) -> None:
    """Forward and backward of the batch of ``step``, on ours or on the twin."""
    clicks = batch(step, every_row=every_row)
    values = module(clicks.jagged(next(module.parameters()).device)).values()
    values.backward(scale * output_gradient(step).to(values.device, values.dtype))


class Pooled:
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self) -> Tensor:
        return self._values


class TorchTwin(nn.Module):
    """``torch.nn.EmbeddingBag``s with the initial rows of :func:`make`."""

    def __init__(self, dtype: torch.dtype, *, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                table.spec.name: nn.EmbeddingBag.from_pretrained(
                    table.parameter.detach().to(dtype, copy=True),
                    freeze=False,
                    mode="sum",
                    sparse=sparse,
                    include_last_offset=True,
                )
                for table in make("cpu")._tables
            }
        )

    def forward(self, features: Any) -> Pooled:
        size = features.batch_size
        columns = []
        for number, name in enumerate(features.keys):
            offsets = features.offsets[number * size : (number + 1) * size + 1]
            ids = features.values[offsets[0] : offsets[-1]]
            columns.append(self.bags[name](ids, offsets - offsets[0]))
        return Pooled(torch.cat(columns, dim=1))


def weight(module: nn.Module, name: str) -> nn.Parameter:
    bags = module.bags if isinstance(module, TorchTwin) else module.embedding_bags
    return bags[name].weight


def weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight(module, name) for name in NAMES}


def rows(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all tables."""
    return {name: parameter.detach().clone() for name, parameter in weights(module).items()}


Training = Callable[[nn.Module], None]
"""Makes an optimizer for a module and trains it."""


def steps(make_optimizer: Callable[[Iterable[Any]], Any], *, every_row: bool = False) -> Training:
    """Ordinary steps with what ``make_optimizer`` makes of the parameters."""

    def train(module: nn.Module) -> None:
        optimizer = make_optimizer(module.parameters())
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(module, step, every_row=every_row)
            optimizer.step()

    return train


def assert_trains_as(
    ours: nn.Module, train_ours: Training, train_theirs: Training, *, sparse: bool = False
) -> None:
    """Assert that after training every table follows what torch makes of its twin."""
    before = rows(ours)
    train_ours(ours)

    def formula(name: str) -> Formula:
        def compute(dtype: torch.dtype) -> Tensor:
            twin = TorchTwin(dtype, sparse=sparse)
            train_theirs(twin)
            return weight(twin, name).detach()

        return compute

    for name, parameter in weights(ours).items():
        assert not torch.equal(parameter, before[name])
        assert_follows(parameter, formula(name))


class TablesAndLayer(nn.Module):
    """Tables, and a dense layer over them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.tables = make(device)
        self.dense = nn.Linear(11, 2, bias=False, device=device)
        with torch.no_grad():
            self.dense.weight.copy_(torch.arange(22).view(2, 11) / 16 - 0.5)

    def loss(self, step: int) -> Tensor:
        values = self.tables(batch(step).jagged(self.dense.weight.device)).values()
        return self.dense(values).square().sum()
