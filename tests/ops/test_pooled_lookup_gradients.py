"""Gradients of ``pooled_lookup``: sparse tensors, sinks, frozen weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import oracle
from tests.support.bags import EDGE_CASES, bags_of
from tests.support.lookups import Lookup, random_bags
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed.core.types import OptimizerKind, Pooling
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_the_sparse_gradient_sums_to_the_dense_one(
    pooling: Pooling, weight_dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    lookup = Lookup(
        random_bags(sizes, fixed=False),
        device,
        weight_dtype=weight_dtype,
        pooling=pooling,
        weighted=True,
    )
    sparse = lookup.gradients(weight_form=WeightGradient.SPARSE)[0]
    assert sparse.layout == torch.sparse_coo and not sparse.is_coalesced()
    assert sparse.shape == lookup.weight.shape and sparse.dtype == weight_dtype
    assert sparse._nnz() == lookup.bags.rows.numel()

    def entries(dtype: torch.dtype) -> Tensor:
        """The gradient of each id on its own, as if every id had a row to itself."""
        num_ids = lookup.bags.rows.numel()
        positions = torch.arange(num_ids)
        positions[lookup.bags.rows < 0] = -1
        bags = bags_of(lookup.bags.lengths, positions, num_ids, lookup.bags.num_features)
        weight = torch.zeros(num_ids, 16, dtype=dtype, requires_grad=True)
        output = oracle.pooled_lookup(
            weight,
            bags,
            per_id_weights=lookup.per_id_weights.cpu().to(dtype),
            mean=pooling is Pooling.MEAN,
        )
        return torch.autograd.grad(output, weight, lookup.grad.cpu().to(dtype))[0]

    assert_follows(sparse._values(), entries)
    # Entries of missing rows are zeros, at a row that the batch touches.
    indices, rows = sparse._indices()[0].cpu(), lookup.bags.rows
    assert torch.equal(indices, torch.where(rows >= 0, rows, rows.amax()))
    if weight_dtype == torch.float32:
        assert_follows(sparse.to_dense(), lookup.gradient_formula(0))


def test_a_sink_takes_the_gradients(device: torch.device, sizes: Sizes) -> None:
    lookup = Lookup(random_bags(sizes, fixed=False), device, pooling=Pooling.MEAN, weighted=True)
    taken: list[tuple[Tensor, RowGradients]] = []
    leaves = lookup.leaves()
    output = lookup.run(leaves, sink=lambda rows, gradients: taken.append((rows, gradients)))
    assert not taken
    output.backward(lookup.grad)
    assert leaves[0].grad is None
    assert leaves[1].grad is not None
    assert_same_bits(leaves[1].grad, lookup.gradients()[1])
    ((rows, gradients),) = taken
    assert torch.equal(rows, lookup.rows)

    total = torch.zeros_like(lookup.weight)
    minus_one = torch.full((1,), -1.0, device=device)
    rule = UpdateRule(kind=OptimizerKind.SGD)
    rowwise_update(total, (), find_runs(rows, lookup.bags.num_rows), gradients, rule, minus_one)
    assert_same_bits(total, lookup.gradients()[0])


def test_a_frozen_weight_has_no_gradient_and_fills_no_sink(device: torch.device) -> None:
    lookup = Lookup(EDGE_CASES["some_missing"], device, weighted=True)
    leaves = lookup.leaves()
    leaves[0].requires_grad_(False)
    taken: list[Any] = []
    lookup.run(leaves, sink=lambda *entry: taken.append(entry)).backward(lookup.grad)
    assert leaves[0].grad is None and not taken
    assert_follows(leaves[1].grad, lookup.gradient_formula(1))


def test_the_weight_may_change_between_forward_and_backward(device: torch.device) -> None:
    lookup = Lookup(EDGE_CASES["some_missing"], device)
    leaves = lookup.leaves()
    output = lookup.run(leaves)
    with torch.no_grad():
        leaves[0].zero_()
    (gradient,) = torch.autograd.grad(output, leaves, lookup.grad)
    assert_same_bits(gradient, lookup.gradients()[0])


def test_a_changed_weight_is_an_error_where_backward_reads_it(device: torch.device) -> None:
    lookup = Lookup(EDGE_CASES["some_missing"], device, weighted=True)
    leaves = lookup.leaves()
    output = lookup.run(leaves)
    with torch.no_grad():
        leaves[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(lookup.grad)
