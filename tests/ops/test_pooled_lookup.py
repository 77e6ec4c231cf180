"""``pooled_lookup`` against a formula, against torch's ``embedding_bag``, and against itself."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.bags import EDGE_CASES, random_jagged
from tests.support.lookups import Lookup, random_bags
from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous
from torchembed.core.types import Pooling
from torchembed.ops.pooled_lookup import pooled_lookup
from torchembed.ops.row_gradients import WeightGradient

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("output_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_follows_the_formula(
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype,
    pooling: Pooling,
    weighted: bool,
    fixed: bool,
    device: torch.device,
    sizes: Sizes,
) -> None:
    Lookup(
        random_bags(sizes, fixed),
        device,
        weight_dtype=weight_dtype,
        output_dtype=output_dtype,
        pooling=pooling,
        weighted=weighted,
    ).check()


@pytest.mark.parametrize("per_id_dtype", FLOATS)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_follows_the_formula_in_every_dim(
    per_id_dtype: torch.dtype, pooling: Pooling, device: torch.device, sizes: Sizes
) -> None:
    for dim in sizes.dims:
        Lookup(
            random_bags(sizes, fixed=False),
            device,
            dim=dim,
            pooling=pooling,
            weighted=True,
            per_id_dtype=per_id_dtype,
        ).check()


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_cases(case: str, pooling: Pooling, weighted: bool, device: torch.device) -> None:
    lookup = Lookup(EDGE_CASES[case], device, dim=5, pooling=pooling, weighted=weighted)
    lookup.check()
    sparse = lookup.gradients(weight_form=WeightGradient.SPARSE)[0]
    assert_follows(sparse.to_dense(), lookup.gradient_formula(0))


@pytest.mark.parametrize("dim", [0, 3])
def test_a_table_without_rows_or_columns(dim: int, device: torch.device) -> None:
    rows = torch.tensor([-1, -1], device=device)
    weight = torch.zeros(0 if dim else 4, dim, device=device, requires_grad=True)
    per_id_weights = torch.ones(2, device=device, requires_grad=True)
    output = pooled_lookup(weight, rows, hotness=[1], batch_size=2, per_id_weights=per_id_weights)
    assert torch.equal(output.cpu(), torch.zeros(2, 1, dim))
    grads = torch.autograd.grad(output, [weight, per_id_weights], torch.ones_like(output))
    assert grads[0].shape == weight.shape
    assert torch.equal(grads[1].cpu(), torch.zeros(2))


def test_worked_example(device: torch.device) -> None:
    weight = torch.tensor([[10.0], [20.0], [30.0]], device=device)
    rows = torch.tensor([0, 2, 2], device=device)
    offsets = torch.tensor([0, 2, 2, 3], device=device)
    output = pooled_lookup(weight, rows, offsets=offsets, batch_size=3)
    assert output.flatten().tolist() == [40.0, 0.0, 30.0]


def test_output_is_sample_major(device: torch.device) -> None:
    weight = torch.arange(6.0, device=device).unsqueeze(1)
    rows = torch.arange(6, device=device)
    output = pooled_lookup(weight, rows, hotness=[1, 1], num_features=2, batch_size=3)
    assert output.squeeze(2).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_mean_counts_missing_rows(device: torch.device) -> None:
    weight = torch.tensor([[6.0]], device=device)
    rows = torch.tensor([0, -1, -1], device=device)
    output = pooled_lookup(weight, rows, hotness=[3], batch_size=1, pooling=Pooling.MEAN)
    assert output.item() == 2.0


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_low_precision_rows_are_summed_in_float32(
    dtype: torch.dtype, large: int, device: torch.device
) -> None:
    # Adding 1 to so large a number changes nothing in the rows' own dtype.
    weight = torch.tensor([[large], [1]], dtype=dtype, device=device, requires_grad=True)
    rows = torch.tensor([0] + [1] * 40, device=device)
    output = pooled_lookup(weight, rows, hotness=[41], batch_size=1, output_dtype=torch.float32)
    assert output.item() == large + 40
    # Nor does it in the sum of gradients: 40 of them are 1 and one is large.
    rows = torch.zeros(41, dtype=torch.int64, device=device)
    output = pooled_lookup(weight, rows, hotness=[1], batch_size=41, output_dtype=torch.float32)
    grad = torch.tensor([large] + [1.0] * 40, device=device).view(41, 1, 1)
    (gradient,) = torch.autograd.grad(output, weight, grad)
    assert gradient.flatten().tolist() == [large + 40, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_rounded_once(dtype: torch.dtype, device: torch.device, sizes: Sizes) -> None:
    bags = random_bags(sizes, fixed=False)
    wide, narrow = (
        Lookup(bags, device, weighted=True, pooling=Pooling.MEAN, output_dtype=output_dtype)
        for output_dtype in (torch.float32, dtype)
    )
    assert_same_bits(narrow.forward(), wide.forward().to(dtype))
    # And the gradient of 16-bit rows: as that of the same rows in float32, rounded.
    narrow.weight, wide.weight = wide.weight.to(dtype), wide.weight.to(dtype).float()
    wide.grad = narrow.grad.float()
    assert_same_bits(narrow.gradients()[0], wide.gradients()[0].to(dtype))


def test_sums_are_in_the_order_of_positions(device: torch.device, sizes: Sizes) -> None:
    bags = random_jagged(2, sizes.batch_size, sizes.num_rows, max_length=40, missing=0.0)
    lookup = Lookup(bags, device)
    expected = torch.zeros(len(bags.lengths), 16)
    ends = bags.offsets.tolist()
    for bag, (first, last) in enumerate(itertools.pairwise(ends)):
        for row in bags.rows[first:last].tolist():
            expected[bag] += lookup.weight[row].cpu()
    by_feature = expected.view(2, bags.batch_size, 16)
    assert torch.equal(lookup.forward().cpu(), by_feature.transpose(0, 1))


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_fixed_hotness_equals_jagged_bags(
    weighted: bool, pooling: Pooling, device: torch.device, sizes: Sizes
) -> None:
    bags = random_bags(sizes, fixed=True)
    fixed = Lookup(bags, device, pooling=pooling, weighted=weighted)
    jagged = Lookup(bags.jagged(), device, pooling=pooling, weighted=weighted)
    assert_same_bits(fixed.forward(), jagged.forward())
    for gradient, expected in zip(fixed.gradients(), jagged.gradients(), strict=True):
        assert_same_bits(gradient, expected)


@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_integer_dtypes_change_nothing(
    rows_dtype: torch.dtype, offsets_dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    lookup = Lookup(random_bags(sizes, fixed=False), device, pooling=Pooling.MEAN, weighted=True)
    changes = {
        "rows": lookup.rows.to(rows_dtype),
        "offsets": lookup.bags.offsets.to(device, offsets_dtype),
    }
    assert_same_bits(lookup.forward(**changes), lookup.forward())
    for gradient, expected in zip(lookup.gradients(**changes), lookup.gradients(), strict=True):
        assert_same_bits(gradient, expected)


def test_inputs_need_not_be_contiguous(device: torch.device, sizes: Sizes) -> None:
    lookup = Lookup(random_bags(sizes, fixed=False), device, weighted=True)
    leaves = lookup.leaves()
    strided = [not_contiguous(leaf) for leaf in leaves]
    changes = {
        "rows": not_contiguous(lookup.rows),
        "offsets": not_contiguous(lookup.bags.offsets.to(device)),
    }
    output = lookup.run(strided, **changes)
    assert_same_bits(output, lookup.forward())
    gradients = torch.autograd.grad(output, leaves, not_contiguous(lookup.grad))
    for gradient, expected in zip(gradients, lookup.gradients(), strict=True):
        assert_same_bits(gradient, expected)


def test_the_incoming_gradient_may_be_expanded(device: torch.device, sizes: Sizes) -> None:
    lookup = Lookup(random_bags(sizes, fixed=False), device)
    lookup.grad = torch.ones_like(lookup.grad)
    leaves = lookup.leaves()
    lookup.run(leaves).sum().backward()
    assert leaves[0].grad is not None
    assert_same_bits(leaves[0].grad, lookup.gradients()[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_equals_torch_embedding_bag(mode: str, device: torch.device, sizes: Sizes) -> None:
    bags = random_jagged(1, sizes.batch_size, sizes.num_rows, missing=0.0)
    weighted = mode == "weighted"
    pooling = Pooling.MEAN if mode == "mean" else Pooling.SUM
    lookup = Lookup(bags, device, pooling=pooling, weighted=weighted)

    def embedding_bag(leaves: list[Tensor]) -> Tensor:
        return torch.nn.functional.embedding_bag(
            bags.rows,
            leaves[0],
            bags.offsets,
            mode="mean" if mode == "mean" else "sum",
            per_sample_weights=leaves[1] if weighted else None,
            include_last_offset=True,
        ).unsqueeze(1)

    def leaves_in(dtype: torch.dtype) -> list[Tensor]:
        return [leaf.detach().cpu().to(dtype).requires_grad_() for leaf in lookup.leaves()]

    assert_follows(lookup.forward(), lambda dtype: embedding_bag(leaves_in(dtype)))
    for leaf, gradient in enumerate(lookup.gradients()):

        def gradient_of(dtype: torch.dtype, leaf: int = leaf) -> Tensor:
            leaves = leaves_in(dtype)
            grad = lookup.grad.cpu().to(dtype)
            return torch.autograd.grad(embedding_bag(leaves), leaves, grad)[leaf]

        assert_follows(gradient, gradient_of)


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
def test_repeats_its_bits(
    fixed: bool, device: torch.device, sizes: Sizes, fastest_algorithms: None
) -> None:
    large = sizes._replace(batch_size=sizes.num_parallel_ids // 6)
    lookup = Lookup(random_bags(large, fixed), device, dim=48, pooling=Pooling.MEAN, weighted=True)
    assert_repeats(lambda: (lookup.forward(), *lookup.gradients()))


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_opcheck(weighted: bool, fixed: bool, device: torch.device, sizes: Sizes) -> None:
    lookup = Lookup(random_bags(sizes, fixed), device, dim=8, weighted=weighted)
    bags, rows, per_id_weights = lookup.bags, lookup.rows, lookup.per_id_weights
    offsets = None if fixed else bags.offsets.to(device)
    hotness = list(bags.hotness or ())
    ops = torch.ops.torchembed
    shape = (bags.num_features, bags.batch_size)
    for mean in (False, True):
        torch.library.opcheck(
            ops.pooled_lookup_forward.default,
            (lookup.weight, rows, offsets, hotness, per_id_weights, *shape, mean, torch.bfloat16),
        )
        torch.library.opcheck(
            ops.pooled_lookup_gradient_map.default,
            (rows, offsets, hotness, per_id_weights, *shape, mean),
        )
        torch.library.opcheck(
            ops.pooled_lookup_weights_backward.default,
            (lookup.grad, lookup.weight, rows, offsets, hotness, mean),
        )


@pytest.mark.parametrize("fixed", [False, True], ids=["jagged", "fixed"])
def test_compiles_whole_and_once_for_every_size(
    fixed: bool, device: torch.device, sizes: Sizes
) -> None:

    def squared(weight: Tensor, rows: Tensor, per_id_weights: Tensor, **grouping: Any) -> Tensor:
        return pooled_lookup(weight, rows, per_id_weights=per_id_weights, **grouping).square()

    compiled = compiled_once(squared)
    for step in range(3):
        # 64 ids at least: the compiler keeps none, one and more slots of chunks apart.
        larger = sizes._replace(batch_size=8 * sizes.batch_size + step)
        lookup = Lookup(random_bags(larger, fixed, seed=step), device, dim=13, weighted=True)
        grouping = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in lookup.bags.grouping().items()
        }
        results = []
        for function in (squared, compiled):
            leaves = lookup.leaves()
            output = function(leaves[0], lookup.rows, leaves[1], **grouping)
            results.append([output, *torch.autograd.grad(output, leaves, lookup.grad)])
        for expected, result in zip(*results, strict=True):
            assert_same_bits(result, expected)


def test_more_than_two_to_the_31_elements(device: torch.device, fastest_algorithms: None) -> None:
    # Pages that nothing touches take no memory on the CPU.
    dim = 64
    num_rows = 2**31 // dim + 3
    weight = torch.empty(num_rows, dim, dtype=torch.float16, device=device)
    rows = torch.tensor([num_rows - 1, 0, num_rows - 2, num_rows - 1], device=device)
    weight[rows] = normal(4, dim, seed=0, dtype=torch.float16, device=device)
    output = pooled_lookup(weight, rows, hotness=[2], batch_size=2)
    expected = weight[rows].float().view(2, 2, dim).sum(1, keepdim=True).half()
    assert_same_bits(output, expected)
