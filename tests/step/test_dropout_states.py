"""Comparisons leave recurrent layers' dropout as it is: that of torch's generator, and, by an
operation in place of cuDNN's, that of a state which only its operation is given."""

import collections
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import torchembed
from tests.support.tape import taped_captures
from tests.support.tiny_model import TinyModel, fixed_batches, make_optimizers, step_by_hand
from tests.support.tiny_training import LOSS, assert_same_state, state_of
from torchembed.step.trained_modules import TrainedModules
from torchembed.step.watches.dropout_states import DropoutStates
from torchembed.step.watches.self_check import SelfCheck
from torchembed.training import TrainPipeline

NUM_STEPS = 14
LIBRARY = torch.library.Library("torchembed_test_dropout", "DEF")
LIBRARY.define("draw(Tensor x, Tensor(a!)? dropout_state) -> Tensor")


def _draw(x: Tensor, dropout_state: Tensor) -> Tensor:
    dropout_state.add_(1)
    return torch.remainder(dropout_state, 3).to(x)


LIBRARY.impl("draw", _draw, "CPU")


@pytest.fixture(autouse=True)
def _taped() -> Iterator[None]:
    with taped_captures():
        yield


class WithState(nn.LSTM):
    """Draws from a state that no module holds."""

    states: list[Tensor]

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = super().forward(x)
        with torch.no_grad():
            factor = torch.ops.torchembed_test_dropout.draw(x, self.states[0])
        return output * factor, hidden


class Recurrent(TinyModel):
    """Calls an LSTM with dropout, of this class."""

    def __init__(self, layer: type[nn.LSTM], factors: Iterator[float]) -> None:
        super().__init__(is_deep=True)
        self.lstm = layer(1, 4, num_layers=2, batch_first=True, dropout=0.5)
        self._factors = factors

    def forward(self, dense: Tensor, sparse: torchembed.SparseFeatures) -> Tensor:
        states, _ = self.lstm(self.tables(sparse).values()[:, :, None] * next(self._factors))
        return super().forward(dense, sparse) + states[:, -1, :1]


def started(layer: type[nn.LSTM], factors: Iterator[float] | None = None) -> Recurrent:
    WithState.states = [torch.zeros(1)]
    model = Recurrent(layer, itertools.repeat(1.0) if factors is None else factors)
    torch.manual_seed(1)
    return model


@pytest.mark.parametrize("layer", [nn.LSTM, WithState])
def test_steps_that_are_compared_equal_a_loop_by_hand(layer: type[nn.LSTM]) -> None:
    batches, by_hand = fixed_batches(NUM_STEPS), started(layer)
    optimizers = make_optimizers(by_hand)
    expected = [step_by_hand(by_hand, LOSS, optimizers, batch).item() for batch in batches]
    model, iterator = started(layer), iter(batches)
    with TrainPipeline(
        model, LOSS, make_optimizers(model), capture=True, self_check_every=2
    ) as pipeline:
        losses = [pipeline.progress(iterator).loss.item() for _ in batches]
        assert pipeline.engine.is_captured
    assert losses == expected
    assert_same_state(model, state_of(by_hand))


@pytest.mark.parametrize("layer", [nn.LSTM, WithState])
def test_a_difference_before_dropout_is_found(layer: type[nn.LSTM]) -> None:
    model, batches = started(layer, itertools.count(1.0)), iter(fixed_batches(NUM_STEPS))
    difference = rf"the output of lstm \({layer.__name__}\) has the norm"
    with TrainPipeline(
        model, LOSS, make_optimizers(model), capture=True, self_check_every=2
    ) as pipeline:
        with pytest.warns(UserWarning, match=difference):
            collections.deque(map(pipeline.progress, [batches] * NUM_STEPS), maxlen=0)
        assert not pipeline.engine.is_captured


def test_a_layer_that_raises_leaves_nothing_behind() -> None:
    model = started(nn.LSTM)
    with DropoutStates(TrainedModules(model, None)).observed(), pytest.raises(RuntimeError):
        model.lstm(torch.ones(1, 2, 3))
    assert _get_current_dispatch_mode() is None
    assert not model.lstm._forward_hooks
    assert not model.lstm._forward_pre_hooks


def test_compiled_layers_with_dropout_are_not_compared() -> None:
    for dropout in (0.0, 0.5):
        model = nn.Sequential(nn.LSTM(1, 4, num_layers=2, dropout=dropout))
        for trained in (TrainedModules(model, None), TrainedModules(nn.Identity(), model)):
            assert SelfCheck.can_check(trained)
        model.compile()
        for trained in (TrainedModules(model, None), TrainedModules(nn.Identity(), model)):
            assert SelfCheck.can_check(trained) == (dropout == 0.0)
