"""``DotInteraction`` against TorchRec's, and by hand."""

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_follows
from tests.support.values import normal
from torchembed.modules.dense.interaction import DotInteraction


def test_by_hand(device: torch.device) -> None:
    dense = torch.tensor([[1.0, 2.0]], device=device)
    sparse = torch.tensor([[[3.0, 4.0], [5.0, 6.0]]], device=device)
    # 1 * 3 + 2 * 4 = 11, 1 * 5 + 2 * 6 = 17, 3 * 5 + 4 * 6 = 39.
    assert DotInteraction()(dense, sparse).tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0]]


@pytest.mark.parametrize("num_features", [0, 1, 7])
@pytest.mark.parametrize("batch_size", [0, 5])
def test_equals_torchrecs(batch_size: int, num_features: int, device: torch.device) -> None:
    dlrm = pytest.importorskip("torchrec.models.dlrm", reason="needs TorchRec")
    inputs = [
        normal(batch_size, 6, seed=1, device=device),
        normal(batch_size, num_features, 6, seed=2, device=device),
    ]
    width = 6 + num_features * (num_features + 1) // 2
    grad = normal(batch_size, width, seed=3, device=device)

    def results(module: torch.nn.Module, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        output = module(*leaves)
        gradients = torch.autograd.grad(output, leaves, grad.to(dtype), materialize_grads=True)
        return [output, *gradients]

    theirs = dlrm.InteractionArch(num_features).to(device)
    for which, actual in enumerate(results(DotInteraction(), torch.float32)):
        assert_follows(actual, lambda dtype, which=which: results(theirs, dtype)[which])


def test_compiles_whole(device: torch.device) -> None:
    compiled = torch.compile(DotInteraction(), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch_size in (4, 7):
        dense = normal(batch_size, 6, seed=1, device=device)
        sparse = normal(batch_size, 3, 6, seed=2, device=device)
        assert torch.equal(compiled(dense, sparse), DotInteraction()(dense, sparse))


@pytest.mark.parametrize("shape", [(4, 6), (5, 2, 6), (4, 2, 5)])
def test_shapes_that_do_not_fit_are_named(shape: tuple[int, ...]) -> None:
    message = r"^dense must be \[B, D\] and sparse \[B, F, D\], got shapes \(4, 6\) and \("
    with pytest.raises(ValueError, match=message):
        DotInteraction()(torch.zeros(4, 6), torch.zeros(shape))
