"""Tables under random histories, beside a plain dict of rows."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from tests.support.sizes import Sizes
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, InPlaceFunction, SparseFeatures
from torchembed.optim import SGD, Adagrad
from torchembed.optim.fused import FusedOptimizer

Row = tuple[str, int]

ROWS = {"a": 3, "b": 4, "c": 2}
DIMS = {"a": 2, "b": 2, "c": 3}
FEATURES = ("x", "y", "z")
NUM_IDS = {"x": 3, "y": 4, "z": 2}
SLOTS = (("a", "x"), ("b", "x"), ("b", "y"), ("c", "z"))
BATCH_SIZE = 2
GROUPINGS = ([["a", "b", "c"]], [["a"], ["b"], ["c"]], [["c", "b"], ["a"]])
LEARNING_RATES = (1.0, 0.25)
EPS = 2.0**-24
"""Half the distance of float32 numbers at 1: one rounding."""


def fill(weight: Tensor) -> None:
    weight.copy_(torch.arange(weight.numel()).view_as(weight) + 1)


TABLES = [
    EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS[name],
        embedding_dim=DIMS[name],
        feature_names=tuple(feature for table, feature in SLOTS if table == name),
        initializer=InPlaceFunction(fill),
    )
    for name in ROWS
]


@dataclasses.dataclass
class Model:
    """The contents that the tables should have: a list of numbers for each row."""

    rows: dict[Row, list[float]]
    sums: dict[Row, list[float]]
    """Adagrad's state."""
    pending: dict[Row, list[float]]
    """Summed gradients of the rows that were touched since the last step."""


def initial_rows() -> dict[Row, list[float]]:
    return {
        (name, row): [float(row * DIMS[name] + column + 1) for column in range(DIMS[name])]
        for name, count in ROWS.items()
        for row in range(count)
    }


def zeros() -> dict[Row, list[float]]:
    return {row: [0.0] * len(values) for row, values in initial_rows().items()}


class TableMachine(RuleBasedStateMachine):
    """SGD's arithmetic is exact here: integers, and learning rates that are powers of two.
    Adagrad's sums of squares are, too; its rows are checked step by step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @initialize(kind=st.sampled_from([SGD, Adagrad]), grouping=st.sampled_from(GROUPINGS))
    def make(self, kind: type[FusedOptimizer], grouping: list[list[str]]) -> None:
        self.kind = kind
        self.module = EmbeddingBagCollection(TABLES, device=self.device)
        self.frozen: set[str] = set()
        self.model = Model(initial_rows(), zeros(), {})
        self.saved: tuple[Any, ...] | None = None
        self._make_optimizer(grouping)

    def _make_optimizer(self, grouping: list[list[str]]) -> None:
        self.grouping = grouping
        weights = {name: self.module.embedding_bags[name].weight for name in ROWS}
        self.optimizer = self.kind(
            [
                {"params": [weights[name] for name in names], "lr": lr}
                for names, lr in zip(grouping, (*LEARNING_RATES, 1.0), strict=False)
            ]
        )

    def _lr(self, table: str) -> float:
        (number,) = (n for n, names in enumerate(self.grouping) if table in names)
        return self.optimizer.param_groups[number]["lr"]

    @rule(data=st.data(), is_jagged=st.booleans(), trained=st.booleans())
    def look_up(self, data: st.DataObject, is_jagged: bool, trained: bool) -> None:
        length = st.integers(0, 3) if is_jagged else st.just(data.draw(st.integers(0, 2)))
        bags = {
            feature: [
                data.draw(st.lists(st.integers(0, NUM_IDS[feature] - 1), min_size=n, max_size=n))
                for n in (data.draw(length) for _ in range(BATCH_SIZE))
            ]
            for feature in FEATURES
        }
        lengths = torch.tensor([len(bag) for feature in FEATURES for bag in bags[feature]])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(self.device)
        ids = [i for feature in FEATURES for bag in bags[feature] for i in bag]
        features = SparseFeatures(
            keys=FEATURES,
            values=torch.tensor(ids, dtype=torch.int64, device=self.device),
            batch_size=BATCH_SIZE,
            offsets=offsets if is_jagged else None,
            hotness=None if is_jagged else tuple(len(bags[f][0]) for f in FEATURES),
        )
        with torch.set_grad_enabled(trained):
            values = self.module(features).values()
        self._check_pooled(values.tolist(), bags)
        if not trained:
            return
        width = values.shape[1]
        row = st.lists(st.integers(-3, 3), min_size=width, max_size=width)
        gradient = data.draw(st.lists(row, min_size=BATCH_SIZE, max_size=BATCH_SIZE))
        if values.requires_grad:
            values.backward(torch.tensor(gradient, dtype=torch.float32, device=self.device))
        for sample, column, table, bag in self._bags(bags):
            for i in bag if table not in self.frozen else []:
                total = self.model.pending.setdefault((table, i), [0.0] * DIMS[table])
                for d in range(DIMS[table]):
                    total[d] += gradient[sample][column + d]

    @staticmethod
    def _bags(bags: dict[str, list[list[int]]]) -> Iterator[tuple[int, int, str, list[int]]]:
        """Sample, first column, table and ids of every bag."""
        column = 0
        for table, feature in SLOTS:
            for sample in range(BATCH_SIZE):
                yield sample, column, table, bags[feature][sample]
            column += DIMS[table]

    def _check_pooled(self, values: list[list[float]], bags: dict[str, list[list[int]]]) -> None:
        for sample, column, table, bag in self._bags(bags):
            for d in range(DIMS[table]):
                terms = [self.model.rows[table, i][d] for i in bag]
                error = abs(values[sample][column + d] - sum(terms))
                # Adagrad's rows are any numbers: each addition rounds once.
                allowed = len(bag) * EPS * sum(map(abs, terms)) if self.kind is Adagrad else 0.0
                assert error <= allowed

    @rule()
    def step(self) -> None:
        self.optimizer.step()
        for (table, row), gradient in self.model.pending.items():
            found = self.module.embedding_bags[table].weight[row].tolist()
            weights, sums = self.model.rows[table, row], self.model.sums[table, row]
            lr = self._lr(table)
            for d, g in enumerate(gradient):
                if self.kind is SGD:
                    weights[d] -= lr * g
                    continue
                sums[d] += g * g
                expected = weights[d] - (lr * g / (sums[d] ** 0.5 + 1e-10))
                # Root, sum, quotient, product and difference: each rounds once.
                assert abs(found[d] - expected) <= 5 * EPS * (abs(expected) + lr)
                weights[d] = found[d]
        self.model.pending.clear()

    @rule()
    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.model.pending.clear()

    @precondition(lambda self: not self.optimizer_has_gradients())
    @rule(table=st.sampled_from(list(ROWS)))
    def freeze_or_unfreeze(self, table: str) -> None:
        self.frozen ^= {table}
        self.module.embedding_bags[table].weight.requires_grad_(table not in self.frozen)

    def optimizer_has_gradients(self) -> bool:
        return any(group.pending for group in self.module._table_set.groups)

    @precondition(lambda self: not self.optimizer_has_gradients())
    @rule(grouping=st.sampled_from(GROUPINGS))
    def take_over(self, grouping: list[list[str]]) -> None:
        self._make_optimizer(grouping)
        self.model.sums = zeros()

    @rule(keeps_state=st.booleans())
    def copy_the_module(self, keeps_state: bool) -> None:
        state = self.optimizer.state_dict()
        self.module = copy.deepcopy(self.module)
        self._make_optimizer(self.grouping)
        self.model.pending.clear()
        if keeps_state:
            self.optimizer.load_state_dict(state)
        else:
            self.model.sums = zeros()

    @rule()
    def convert(self) -> None:
        self.module._apply(torch.clone)

    @rule()
    def reset_parameters(self) -> None:
        self.module.reset_parameters()
        self.model.rows = initial_rows()

    @rule()
    def save(self) -> None:
        self.saved = copy.deepcopy(
            (self.module.state_dict(), self.grouping, self.optimizer.state_dict(), self.model)
        )

    @precondition(lambda self: self.saved is not None)
    @rule(assign=st.booleans())
    def load(self, assign: bool) -> None:
        assert self.saved is not None
        rows, grouping, state, model = copy.deepcopy(self.saved)
        if assign and self.optimizer_has_gradients():
            self.zero_grad()
        self.module.load_state_dict(rows, assign=assign)
        self.model.rows = model.rows
        if grouping == self.grouping:
            self.optimizer.load_state_dict(state)
            self.model.sums = model.sums

    @invariant()
    def rows_and_state_are_the_models(self) -> None:
        if not hasattr(self, "module"):
            return
        states = self.optimizer.state_dict()["state"]
        names = [name for group in self.grouping for name in group]
        for number, name in enumerate(names):
            found = self.module.embedding_bags[name].weight.tolist()
            assert found == [self.model.rows[name, row] for row in range(ROWS[name])]
            if self.kind is Adagrad:
                sums = states[number]["sum"].tolist()
                assert sums == [self.model.sums[name, row] for row in range(ROWS[name])]

    @invariant()
    def parameters_are_views_of_their_groups(self) -> None:
        if not hasattr(self, "module"):
            return
        table_set = self.module._table_set
        for group in table_set.current_groups():
            assert group.holds_parameters()
            frozen = {table.spec.name in self.frozen for table in group.tables}
            assert len(frozen) == 1


def test_tables_follow_a_dict_of_rows(device: torch.device, sizes: Sizes) -> None:
    run_state_machine_as_test(
        lambda: TableMachine(device),
        settings=hypothesis.settings(
            max_examples=sizes.num_examples,
            stateful_step_count=20,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
