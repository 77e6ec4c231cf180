"""``sequence_lookup`` against a formula, against torch's ``embedding``, and against itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import oracle
from tests.support.bags import random_rows
from tests.support.repeats import assert_repeats
from tests.support.sizes import Sizes
from tests.support.tolerance import assert_follows, assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal, not_contiguous
from torchembed.ops.row_gradients import WeightGradient
from torchembed.ops.rowwise_update import RowGradients
from torchembed.ops.sequence_lookup import sequence_lookup

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROWS: dict[str, tuple[int, list[int]]] = {
    "no ids": (5, []),
    "one id": (5, [3]),
    "one row": (1, [0, 0, 0]),
    "all ids equal": (5, [2, 2, 2, 2]),
    "last row": (7, [6, 6]),
    "all missing": (5, [-1, -1]),
    "some missing": (5, [-1, 4, -1, 0, 4]),
    "no rows": (0, [-1, -1]),
}


def gradient(weight: Tensor, rows: Tensor, grad: Tensor, **options: Any) -> Tensor:
    leaf = weight.detach().clone().requires_grad_()
    output = sequence_lookup(leaf, rows, **options)
    return torch.autograd.grad(output, leaf, grad)[0]


def check(weight: Tensor, rows: Tensor, output_dtype: torch.dtype, form: WeightGradient) -> None:
    """Forward and gradient follow the formula."""
    shape = (rows.numel(), weight.shape[1])
    grad = normal(*shape, seed=7, dtype=output_dtype, device=weight.device)
    output = sequence_lookup(weight, rows, output_dtype=output_dtype)
    assert output.dtype == output_dtype
    assert_follows(output, lambda dtype: oracle.sequence_lookup(weight.cpu().to(dtype), rows))

    def gradient_formula(dtype: torch.dtype) -> Tensor:
        leaf = weight.cpu().to(dtype).requires_grad_()
        formula = oracle.sequence_lookup(leaf, rows)
        return torch.autograd.grad(formula, leaf, grad.cpu().to(dtype))[0]

    result = gradient(weight, rows, grad, output_dtype=output_dtype, weight_form=form)
    assert result.dtype == weight.dtype and result.shape == weight.shape
    assert_follows(result.to_dense(), gradient_formula)


@pytest.mark.parametrize("output_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_follows_the_formula(
    weight_dtype: torch.dtype, output_dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> None:
    num_ids = sizes.batch_size * 5
    rows = random_rows(num_ids, sizes.num_rows, seed=0).to(device)
    for dim in sizes.dims:
        weight = normal(sizes.num_rows, dim, seed=dim, dtype=weight_dtype, device=device)
        check(weight, rows, output_dtype, WeightGradient.DENSE)


@pytest.mark.parametrize("form", list(WeightGradient))
@pytest.mark.parametrize("case", ROWS)
def test_edge_cases(case: str, form: WeightGradient, device: torch.device) -> None:
    num_rows, rows = ROWS[case]
    weight = normal(num_rows, 5, seed=0, device=device)
    check(weight, torch.tensor(rows, dtype=torch.int64, device=device), torch.float32, form)


def test_a_table_without_columns(device: torch.device) -> None:
    weight = torch.zeros(4, 0, device=device, requires_grad=True)
    output = sequence_lookup(weight, torch.tensor([1, -1], device=device))
    assert output.shape == (2, 0)
    assert torch.autograd.grad(output, weight, torch.zeros_like(output))[0].shape == (4, 0)


def test_equals_torch_embedding(device: torch.device, sizes: Sizes) -> None:
    rows = random_rows(sizes.batch_size, sizes.num_rows, seed=0, missing=0.0).to(device)
    weight = normal(sizes.num_rows, 16, seed=0, device=device)
    grad = normal(sizes.batch_size, 16, seed=1, device=device)
    assert_same_bits(sequence_lookup(weight, rows), torch.nn.functional.embedding(rows, weight))

    def gradient_of(dtype: torch.dtype) -> Tensor:
        leaf = weight.cpu().to(dtype).requires_grad_()
        output = torch.nn.functional.embedding(rows.cpu(), leaf)
        return torch.autograd.grad(output, leaf, grad.cpu().to(dtype))[0]

    assert_follows(gradient(weight, rows, grad), gradient_of)


def test_layout_and_integer_dtype_change_nothing(device: torch.device, sizes: Sizes) -> None:
    rows = random_rows(sizes.batch_size, sizes.num_rows, seed=0).to(device)
    weight = normal(sizes.num_rows, 16, seed=0, device=device)
    grad = normal(sizes.batch_size, 16, seed=1, device=device)
    output, expected = sequence_lookup(weight, rows), gradient(weight, rows, grad)
    for other_rows in (rows.int(), not_contiguous(rows)):
        assert_same_bits(sequence_lookup(not_contiguous(weight), other_rows), output)
        assert_same_bits(gradient(weight, other_rows, not_contiguous(grad)), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sparse_gradient_has_an_entry_for_each_id(
    dtype: torch.dtype, device: torch.device
) -> None:
    rows = torch.tensor([3, -1, 3, 0], device=device)
    weight = normal(5, 4, seed=0, dtype=dtype, device=device)
    grad = normal(4, 4, seed=1, dtype=dtype, device=device)
    sparse = gradient(weight, rows, grad, weight_form=WeightGradient.SPARSE)
    assert sparse.layout == torch.sparse_coo and not sparse.is_coalesced()
    assert sparse._indices()[0].tolist() == [3, 3, 3, 0]  # zeros of the missing row: at the largest
    expected = grad.clone()
    expected[1] = 0
    assert_same_bits(sparse._values(), expected)


def test_a_sink_takes_the_gradients(device: torch.device) -> None:
    rows = torch.tensor([3, -1, 3, 0], device=device)
    weight = normal(5, 4, seed=0, device=device).requires_grad_()
    grad = normal(4, 4, seed=1, device=device)
    taken: list[tuple[Tensor, RowGradients]] = []
    output = sequence_lookup(weight, rows, sink=lambda *entry: taken.append(entry))
    output.backward(grad)
    assert weight.grad is None
    ((taken_rows, gradients),) = taken
    assert torch.equal(taken_rows, rows)
    assert torch.equal(gradients.grad, grad)
    assert gradients.gradient_rows is None and gradients.scales is None


def test_the_weight_may_change_between_forward_and_backward(device: torch.device) -> None:
    rows = torch.tensor([3, -1, 3, 0], device=device)
    weight = normal(5, 4, seed=0, device=device).requires_grad_()
    output = sequence_lookup(weight, rows)
    with torch.no_grad():
        weight.zero_()
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [1.0, 0.0, 0.0, 2.0, 0.0]


def test_repeats_its_bits(device: torch.device, sizes: Sizes, fastest_algorithms: None) -> None:
    num_ids = sizes.num_parallel_ids
    rows = random_rows(num_ids, sizes.num_rows, seed=0).to(device)
    weight = normal(sizes.num_rows, 48, seed=0, device=device)
    grad = normal(num_ids, 48, seed=1, device=device)
    assert_repeats(lambda: (sequence_lookup(weight, rows), gradient(weight, rows, grad)))


def test_opcheck(device: torch.device) -> None:
    weight = normal(5, 4, seed=0, device=device)
    rows = torch.tensor([3, -1, 3, 0], device=device)
    op = torch.ops.torchembed.sequence_lookup_forward.default
    for dtype in FLOATS:
        torch.library.opcheck(op, (weight, rows.int(), dtype))


def test_compiles_whole_and_once_for_every_size(device: torch.device, sizes: Sizes) -> None:

    def squared(weight: Tensor, rows: Tensor) -> Tensor:
        return sequence_lookup(weight, rows).square()

    compiled = compiled_once(squared)
    for num_ids in (11, 12, 19):
        rows = random_rows(num_ids, sizes.num_rows, seed=num_ids).to(device)
        weight = normal(sizes.num_rows, 8, seed=0, device=device).requires_grad_()
        expected, output = squared(weight, rows), compiled(weight, rows)
        assert_same_bits(output, expected)
        gradients = [torch.autograd.grad(o.sum(), weight)[0] for o in (expected, output)]
        assert_same_bits(gradients[1], gradients[0])


def test_more_than_two_to_the_31_elements(device: torch.device, fastest_algorithms: None) -> None:
    # Pages that nothing touches take no memory on the CPU.
    dim = 64
    num_rows = 2**31 // dim + 3
    weight = torch.empty(num_rows, dim, dtype=torch.float16, device=device)
    rows = torch.tensor([num_rows - 1, 0, num_rows - 2], device=device)
    values = normal(3, dim, seed=0, dtype=torch.float16, device=device)
    weight[rows] = values
    assert_same_bits(sequence_lookup(weight, rows), values)


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "weight dtype": (
        TypeError,
        r"^weight must be float32 or float16 or bfloat16, got int64; call \.float\(\)$",
        {"weight": torch.zeros(4, 2, dtype=torch.int64)},
    ),
    "weight shape": (
        ValueError,
        r"^weight must have 2 dimension\(s\), got shape \(4,\); reshape it$",
        {"weight": torch.zeros(4)},
    ),
    "rows dtype": (
        TypeError,
        r"^rows must be int32 or int64, got float32; call \.long\(\)$",
        {"rows": torch.zeros(3)},
    ),
    "rows shape": (
        ValueError,
        r"^rows must have 1 dimension\(s\), got shape \(\); reshape it$",
        {"rows": torch.tensor(3)},
    ),
    "rows device": (
        ValueError,
        r"^rows must be on cpu as weight is, got meta; call \.to\('cpu'\)$",
        {"rows": torch.zeros(3, dtype=torch.int64, device="meta")},
    ),
    "output dtype": (
        TypeError,
        r"^output_dtype must be float32, float16 or bfloat16, got torch\.int32$",
        {"output_dtype": torch.int32},
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    error, message, changes = ERRORS[name]
    arguments: dict[str, Any] = {
        "weight": torch.zeros(4, 2),
        "rows": torch.zeros(3, dtype=torch.int64),
    } | changes
    with pytest.raises(error, match=message):
        sequence_lookup(arguments.pop("weight"), arguments.pop("rows"), **arguments)
