"""Captured steps are compared with the model, on a CPU by tapes in place of graphs."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, state_of
from torchembed.step.watches.forward_numbers import Number
from torchembed.step.watches.self_check import _Comparison, _difference
from torchembed.training import TrainPipeline

NUM_STEPS = 16
Change = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class Changed(nn.Module):
    """Calls a function that no module holds."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, vectors: Tensor) -> Tensor:
        return self.change(vectors)


class Deep(TinyModel):
    """Has batch norm and dropout, and changes its vectors."""

    def __init__(self, change: Change = lambda vectors: vectors) -> None:
        super().__init__(is_deep=True)
        self.scaled = Changed(change)

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        vectors = F.dropout(self.scaled(self.tables(sparse).values()), 0.25)
        return self.dense(torch.cat([dense, vectors], dim=1))


def train(
    model: nn.Module, num_steps: int = NUM_STEPS, **settings: Any
) -> tuple[list[bool], list[Tensor], list[str]]:
    """Whether each step was captured, the losses, and the warnings."""
    torch.manual_seed(1)
    batches, kinds, losses = iter(fixed_batches(num_steps)), [], []
    if "optimizers" not in settings:
        settings["optimizers"] = make_optimizers(model)
    with (
        warnings.catch_warnings(record=True) as caught,
        TrainPipeline(model, LOSS, capture=True, **settings) as pipeline,
    ):
        warnings.simplefilter("always")
        for _ in range(num_steps):
            losses.append(pipeline.progress(batches).loss.clone())
            kinds.append(pipeline.engine.is_captured)
    return kinds, losses, [str(warning.message) for warning in caught]


def scaled_by(factors: Iterator[float]) -> Change:
    return lambda vectors: vectors * next(factors)


def test_what_equals_the_model_stays_captured() -> None:
    by_hand, checked, unchecked = Deep(), Deep(), Deep()
    kinds, losses, said = train(checked, self_check_every=2)
    assert (kinds[-1], said) == (True, [])
    _, others, _ = train(unchecked, self_check_every=None)
    optimizers = make_optimizers(by_hand)
    torch.manual_seed(1)
    expected = [step_by_hand(by_hand, LOSS, optimizers, b) for b in fixed_batches(NUM_STEPS)]
    for of_one in (losses, others):
        assert all(itertools.starmap(torch.equal, zip(of_one, expected, strict=True)))
    for model in (checked, unchecked):
        assert all(torch.equal(t, state_of(by_hand)[name]) for name, t in state_of(model).items())


def test_a_number_of_python_ends_captured_steps() -> None:
    kinds, _, said = train(Deep(scaled_by(itertools.count(1.0))), self_check_every=1000)
    assert True in kinds
    assert not kinds[-1]
    (only,) = said
    assert "the graph of the train step computes other numbers than the model does" in only
    assert "the output of scaled (Changed) has the norm" in only


def test_a_difference_that_comes_late_is_found() -> None:
    """The schedule is constant until long after the capture."""
    factors = itertools.chain(itertools.repeat(1.0, 9), itertools.repeat(2.0))
    kinds, _, said = train(Deep(scaled_by(factors)), 24, self_check_every=1)
    assert not kinds[-1]
    assert len(said) == 1
    model = Deep(scaled_by(itertools.chain(itertools.repeat(1.0, 9), itertools.repeat(2.0))))
    assert train(model, 24, self_check_every=None)[2] == []


def test_a_difference_in_one_comparison_alone_ends_nothing() -> None:
    """Forward runs three times before the first capture, twice in it, and then in a comparison."""
    factors = itertools.chain(itertools.repeat(1.0, 5), [2.0], itertools.repeat(1.0))
    kinds, _, said = train(Deep(scaled_by(factors)), self_check_every=1000)
    assert (kinds[-1], said) == (True, [])


@pytest.mark.parametrize("max_grad_norm", [None, 100.0, 0.01])
def test_a_difference_in_gradients_is_found(max_grad_norm: float | None) -> None:
    """Also where they are clipped: the factor is of a part of the gradient alone."""
    factors = itertools.count(1.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.cat([grad[:1] * next(factors), grad[1:]])

    class Model(Deep):
        def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
            return Scaled.apply(super().forward(dense, sparse))

    model = Model()
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)
    _, _, (said,) = train(
        model, optimizers=[optimizer], self_check_every=1000, max_grad_norm=max_grad_norm
    )
    assert "the gradient of dense." in said
    assert "has the norm" in said


@pytest.mark.parametrize("max_grad_norm", [100.0, 0.01])
def test_clipped_gradients_that_equal_stay_captured(max_grad_norm: float) -> None:
    model = Deep()
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.125)
    kinds, _, said = train(
        model, optimizers=[optimizer], self_check_every=2, max_grad_norm=max_grad_norm
    )
    assert (kinds[-1], said) == (True, [])


def test_other_calls_than_in_the_graph_are_a_difference() -> None:
    numbers = itertools.count()

    class Model(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Identity()

        def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
            output = super().forward(dense, sparse)
            return output if next(numbers) < 5 else self.more(output)

    _, _, (said,) = train(Model(), self_check_every=1000)
    assert "forward calls other modules than it did" in said


def comparison(graph: list[float], model: list[float], *shape: int) -> _Comparison:
    epsilon = torch.finfo(torch.float32).eps
    by_graph, by_model = (torch.tensor([pair], dtype=torch.float64) for pair in (graph, model))
    return _Comparison([Number("x", shape, epsilon)], by_graph, by_model, 1)


def test_rounding_is_no_difference() -> None:
    eps = torch.finfo(torch.float32).eps
    limit = 8 * eps * (1 / 40 + 1 / 10)  # of 100 samples of 16 elements
    for sign in (-1, 1):
        near, far = 1 + sign * 0.99 * limit, 1 + sign * 1.01 * limit
        assert _difference(comparison([near, 0.0], [1.0, 0.0], 100, 16)) is None
        assert _difference(comparison([far, 0.0], [1.0, 0.0], 100, 16)) is not None
        # A sum of 1600 elements.
        assert _difference(comparison([1.0, 40 * (near - 1)], [1.0, 0.0], 100, 16)) is None
        assert _difference(comparison([1.0, 40 * (far - 1)], [1.0, 0.0], 100, 16)) is not None


def test_nan_equals_nan_and_nothing_else() -> None:
    nan, inf = float("nan"), float("inf")
    assert _difference(comparison([nan, inf], [nan, inf], 2)) is None
    assert _difference(comparison([nan, 0.0], [1.0, 0.0], 2)) == (
        "x has the norm nan in the graph, and 1 without it"
    )
    assert _difference(comparison([1.0, 0.0], [nan, 0.0], 2)) is not None
    assert _difference(comparison([inf, 0.0], [1.0, 0.0], 2)) is not None


@pytest.mark.parametrize("every", [0, -1])
def test_an_interval_is_positive(every: int) -> None:
    model = Deep()
    with pytest.raises(ValueError, match=rf"self_check_every must be at least 1, .* got {every}"):
        TrainPipeline(model, LOSS, make_optimizers(model), self_check_every=every)
