"""Which weights a backward reads after it has deferred their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.values import normal
from torchembed.autograd.reads import ReadsOf
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.modules import MLP, LowRankCross


def test_what_is_read_later_is_found(device: torch.device) -> None:
    torch.manual_seed(0)
    first = MLP(6, [5, 8], device=device)
    cross = LowRankCross(8, 2, 3, device=device)
    last = MLP(8, [8, 4], device=device)
    weights = {id(p) for layers in (first, last) for p in layers.parameters()}
    weights |= {id(p) for p in (*cross.u, *cross.v, cross.bias[-1])}

    def late_reads(x: Tensor) -> set[int]:
        with DeferredWeightGradients() as deferred, ReadsOf(deferred.weights) as reads:
            x.sum().backward()
            assert {id(weight) for weight in deferred.weights} == weights
        return reads.found

    x = normal(7, 6, seed=0, device=device)
    assert late_reads(last(cross(first(x)))) == set()
    reader = last[0].weight.detach()[2:].t()  # another tensor over a part of the memory
    between = F.pad(first(x) @ reader, (1, 1))
    assert late_reads(last(cross(between))) == {id(last[0].weight)}
    # Where layers are used twice, their second use reads what the first one's gradient was for.
    twice = cross(first(x))
    assert late_reads(last(twice + cross(twice))) == {id(p) for p in (*cross.u, *cross.v)}


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta:UserWarning")
@pytest.mark.parametrize("to_sparse", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc"])
def test_reads_of_sparse_tensors_are_found(to_sparse: str, device: torch.device) -> None:
    matrix = getattr(torch.eye(3, device=device), to_sparse)()
    values = matrix._values() if to_sparse == "to_sparse_coo" else matrix.values()
    x, other = torch.ones(3, 2, device=device), torch.ones(3, 2, device=device)
    with ReadsOf([values, other]) as reads:
        torch.sparse.mm(matrix, x)
    assert reads.found == {id(values)}
