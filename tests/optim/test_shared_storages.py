"""Parameters that share a storage, as those of recurrent layers on a GPU, keep their layout under
the optimizers of dense parameters."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.optim import DenseAdagrad, DenseAdam, DenseSGD

KINDS: dict[str, Any] = {"SGD": DenseSGD, "Adagrad": DenseAdagrad, "Adam": DenseAdam}
NUM_GATES = {nn.LSTM: 4, nn.GRU: 3}


class Recurrent(nn.Module):
    """Two recurrent layers between others."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM, *, bias: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(3, 5)
        self.layers = kind(5, 3, num_layers=2, bias=bias)
        self.after = nn.Linear(3, 1)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=seed) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(self.before(x))[0])


def weights_of(layers: nn.RNNBase) -> list[Tensor]:
    return [layers.get_parameter(name) for name in layers._flat_weights_names]


def lay_out(layers: nn.RNNBase) -> None:
    """Lay weights out as cuDNN does on a GPU: in one storage, which begins with the matrices of all
    layers and ends with biases, for which there is room in any case."""
    matrices = [w for w in weights_of(layers) if w.dim() == 2]
    biases = [w for w in weights_of(layers) if w.dim() == 1]
    num_matrices = sum(w.numel() for w in matrices)
    room = 2 * layers.num_layers * NUM_GATES[type(layers)] * layers.hidden_size
    whole, start = torch.zeros(num_matrices + room, dtype=matrices[0].dtype), 0
    for weight in (*matrices, *biases):
        part = whole[start : start + weight.numel()].view(weight.shape)
        weight.data = part.copy_(weight.detach())
        start += weight.numel()


def places(weights: Sequence[Tensor]) -> list[int]:
    """The place where each of the weights begins in their one storage, in elements."""
    (storage,) = {weight.untyped_storage().data_ptr() for weight in weights}
    return [(weight.data_ptr() - storage) // weight.element_size() for weight in weights]


def train(
    model: Recurrent, optimizers: Sequence[torch.optim.Optimizer], num_steps: int = 3
) -> None:
    dtype = model.after.weight.dtype
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(normal(4, 2, 3, seed=100 + step, dtype=dtype)).float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    for parameter, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert_same_bits(parameter.detach(), expected.detach())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_recurrent_layers_stay_as_cudnn_takes_them(
    kind: str, layer: Any, bias: bool, dtype: torch.dtype | None
) -> None:
    models = [Recurrent(layer, bias=bias) for _ in range(2)]
    lay_out(models[0].layers)
    weights = weights_of(models[0].layers)
    before, num_elements = places(weights), weights[0].untyped_storage().nbytes() // 4
    assert before[0] == 0
    for model in models:
        train(model, [KINDS[kind](model.parameters(), lr=0.125, dtype=dtype)])
    assert_same_parameters(*models)
    assert places(weights) == before
    size = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    assert (size, weights[0].dtype) == (num_elements, dtype or torch.float32)


def test_weights_and_biases_may_be_of_several_groups() -> None:
    models = [Recurrent() for _ in range(2)]
    lay_out(models[0].layers)
    weights = weights_of(models[0].layers)
    before = places(weights)
    for model in models:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        biases = [p for p in model.parameters() if p.dim() == 1]
        model.layers.get_parameter("bias_hh_l0").requires_grad_(False)
        groups = [{"params": matrices, "weight_decay": 0.125}, {"params": biases}]
        train(model, [DenseAdam(groups, lr=0.125)])
    assert_same_parameters(*models)
    assert places(weights) == before


@pytest.mark.parametrize("how", ["in place", "by data"])
def test_what_others_write_is_trained_on(how: str) -> None:
    models = [Recurrent() for _ in range(2)]
    lay_out(models[0].layers)
    for model in models:
        optimizer = DenseAdam(model.parameters(), lr=0.125)
        weight = model.layers.get_parameter("weight_hh_l0")
        train(model, [optimizer])
        if how == "by data":
            weight.data.clamp_(-0.125, 0.125)
        else:
            with torch.no_grad():
                weight.clamp_(-0.125, 0.125)
        train(model, [optimizer])
    assert_same_parameters(*models)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_layers_may_be_laid_out_again(dtype: torch.dtype | None) -> None:
    """As by ``flatten_parameters()``, which many call at each forward."""
    models = [Recurrent() for _ in range(2)]
    lay_out(models[0].layers)
    optimizers = [DenseAdam(model.parameters(), lr=0.125, dtype=dtype) for model in models]
    for _ in range(3):
        lay_out(models[0].layers)
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, [optimizer], num_steps=1)
    assert_same_parameters(*models)
    weight = models[0].layers.get_parameter("weight_hh_l0")
    weight.data = weight.double()
    with pytest.raises(RuntimeError, match="was moved, cast or replaced after its optimizer"):
        optimizers[0].step()


def test_states_go_to_models_of_another_layout_and_back() -> None:
    models = [Recurrent() for _ in range(2)]
    lay_out(models[0].layers)
    optimizers = [DenseAdam(model.parameters(), lr=0.125) for model in models]
    for one, other in itertools.permutations(range(2)):
        train(models[one], [optimizers[one]])
        models[other].load_state_dict(models[one].state_dict())
        optimizers[other].load_state_dict(optimizers[one].state_dict())
    assert_same_parameters(*models)
    train(models[0], [optimizers[0]])
    train(models[1], [optimizers[1]])
    assert_same_parameters(*models)


def test_parameters_that_overlap_get_memory_of_their_own() -> None:
    whole = torch.arange(6.0)
    parameters = [nn.Parameter(whole[:4]), nn.Parameter(whole[2:])]
    optimizer = DenseSGD(parameters, lr=1.0)
    parameters[0].grad = torch.ones(4)
    optimizer.step()
    assert parameters[0].tolist() == [-1.0, 0.0, 1.0, 2.0]
    assert parameters[1].tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_torch_finds_one_chunk_of_memory(
    layer: Any, dtype: torch.dtype | None, device: torch.device
) -> None:
    model = Recurrent(layer).to(device)
    optimizer = DenseAdam(model.parameters(), lr=0.125, dtype=dtype)
    x = normal(4, 2, 3, seed=1, dtype=dtype or torch.float32, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            model(x).float().square().sum().backward()
            optimizer.step()
