"""Kernels give the bits of the references wherever sums are exact, at every block and address.

The inputs are small integers, so that no sum rounds and its order does not matter. What is left
must be equal to the bit: which rows are read, how they are scaled, and the arithmetic of updates,
but for square roots, which torch does not always round correctly on the CPU. Rows are of one
column, of part of a block, of a whole block, and of several.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.bags import Bags, random_fixed, random_jagged, random_rows
from tests.support.tolerance import assert_same_bits
from torchembed.core.types import RUN_CHUNK, OnBadId, OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.ops.linearize_ids.reference import linearize_ids_reference
from torchembed.ops.pooled_lookup import reference as pooled_reference
from torchembed.ops.rowwise_update.reference import rowwise_update_reference
from torchembed.ops.segments.reference import find_runs_reference
from torchembed.ops.sequence_lookup.reference import sequence_lookup_forward_reference
from torchembed.triton_kernels import (
    gradient_map,
    linearize_ids,
    pooled_lookup,
    segments,
    sequence_lookup,
)
from torchembed.triton_kernels.rowwise_update import launch_rowwise_update

NUM_ROWS = 11


def small_integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def moved(values: Any, device: torch.device) -> list[Any]:
    """Copies of the tensors among ``values`` on ``device``; the rest as it is."""
    return [value.to(device, copy=True) if isinstance(value, Tensor) else value for value in values]


def bags(fixed: bool, batch_size: int = 5) -> Bags:
    """Bags of three features, with int32 rows."""
    if fixed:
        sample = random_fixed((2, 0, 1), batch_size, NUM_ROWS, seed=1)
    else:
        sample = random_jagged(3, batch_size, NUM_ROWS, seed=1)
    return sample.to("cpu", torch.int32)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("on_bad_id", [OnBadId.ZERO, OnBadId.CLAMP])
@pytest.mark.usefixtures("addresses")
def test_linearize_ids(on_bad_id: OnBadId, fixed: bool, device: torch.device) -> None:
    sample = bags(fixed)
    arguments = (
        sample.rows - 1,
        None if fixed else sample.offsets,
        list(sample.hotness or []),
        torch.tensor([0, 8, 8]),
        torch.tensor([8, 0, 9]),
        sample.batch_size,
        int(on_bad_id),
        torch.int64,
    )
    expected = linearize_ids_reference(*arguments)
    result = linearize_ids.launch_linearize_ids(*moved(arguments, device))
    for actual, wanted in zip(result, expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 2**40])
@pytest.mark.parametrize("num_ids", [1, 1023, 1024, 2049])
@pytest.mark.usefixtures("addresses")
def test_find_runs(num_ids: int, num_rows: int, device: torch.device) -> None:
    rows = random_rows(num_ids, num_rows, seed=3)
    expected = find_runs_reference(rows, num_rows)
    for actual, wanted in zip(
        segments.launch_find_runs(rows.to(device), num_rows), expected, strict=True
    ):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize(
    ("dim", "dtype", "output_dtype"),
    [
        (1, torch.float32, torch.float16),
        (6, torch.bfloat16, torch.float32),
        (64, torch.float16, torch.float16),
        (1030, torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("addresses")
def test_sequence_lookup(
    dim: int, dtype: torch.dtype, output_dtype: torch.dtype, device: torch.device
) -> None:
    weight = small_integers(NUM_ROWS, dim, seed=4, dtype=dtype)
    rows = random_rows(9, NUM_ROWS, seed=5)
    expected = sequence_lookup_forward_reference(weight, rows, output_dtype)
    result = sequence_lookup.launch_sequence_lookup_forward(
        weight.to(device), rows.to(device), output_dtype
    )
    assert_same_bits(result, expected)


@pytest.mark.parametrize(
    ("dim", "fixed", "weighted"),
    [
        (1, False, True),
        (6, False, False),
        (6, False, True),
        (6, True, False),
        (6, True, True),
        (64, True, False),
        (1030, False, True),
        (1030, True, False),
    ],
)
@pytest.mark.usefixtures("addresses")
def test_pooled_lookup(dim: int, fixed: bool, weighted: bool, device: torch.device) -> None:
    dtype = torch.bfloat16 if weighted else torch.float32
    mean = fixed == weighted
    sample = bags(fixed, batch_size=5 if dim < 1024 else 2)
    weight = small_integers(NUM_ROWS, dim, seed=6, dtype=dtype)
    per_id_weights = small_integers(sample.rows.numel(), seed=7) if weighted else None
    grad = small_integers(sample.batch_size, 3, dim, seed=8)
    grouping = (None if fixed else sample.offsets.int(), list(sample.hotness or []))
    sizes = (3, sample.batch_size, mean)

    arguments = (weight, sample.rows, *grouping, per_id_weights, *sizes, torch.float16)
    result = pooled_lookup.launch_pooled_lookup_forward(*moved(arguments, device))
    assert_same_bits(result, pooled_reference.pooled_lookup_forward_reference(*arguments))

    arguments = (sample.rows, *grouping, per_id_weights, *sizes)
    expected = pooled_reference.pooled_lookup_gradient_map_reference(*arguments)
    result = gradient_map.launch_pooled_lookup_gradient_map(*moved(arguments, device))
    for actual, wanted in zip(result, expected, strict=True):
        assert_same_bits(actual, wanted)

    arguments = (grad, weight, sample.rows, *grouping, mean)
    result = pooled_lookup.launch_pooled_lookup_weights_backward(*moved(arguments, device))
    expected = pooled_reference.pooled_lookup_weights_backward_reference(*arguments)
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.bfloat16), (200, torch.float32), (600, torch.float16)]
)
def test_warps_that_pool_wide_rows_alone(
    dim: int,
    dtype: torch.dtype,
    fixed: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooled_lookup, "_FEW_BAGS", 0)
    monkeypatch.setattr(pooled_lookup, "_MANY_IDS_OF_BAG", 0)
    sample = bags(fixed, batch_size=5)
    weight = small_integers(NUM_ROWS, dim, seed=6, dtype=dtype)
    grouping = (None if fixed else sample.offsets.int(), list(sample.hotness or []))
    arguments = (weight, sample.rows, *grouping, None, 3, sample.batch_size, False, torch.float32)
    result = pooled_lookup.launch_pooled_lookup_forward(*moved(arguments, device))
    assert_same_bits(result, pooled_reference.pooled_lookup_forward_reference(*arguments))


def update_arguments(
    rows: Tensor, dim: int, kind: OptimizerKind, dtype: torch.dtype, options: bool
) -> list[Any]:
    """Arguments of a first update of integers; with ``options``, with all that is optional."""
    num_ids = rows.numel()
    state_shape = (NUM_ROWS,) if kind is OptimizerKind.ROWWISE_ADAGRAD else (NUM_ROWS, dim)
    num_states = {OptimizerKind.SGD: 0, OptimizerKind.ADAM: 2}.get(kind, 1)
    states = [small_integers(*state_shape, seed=9).abs() for _ in range(num_states)]
    stochastic = options and dtype != torch.float32
    return [
        small_integers(NUM_ROWS, dim, seed=10, dtype=dtype),
        *states,
        *[None] * (2 - num_states),
        *find_runs_reference(rows, NUM_ROWS),
        small_integers(7 if options else num_ids, dim, seed=11, dtype=dtype),
        (torch.arange(num_ids) % 7).int() if options else None,
        small_integers(num_ids, seed=12) if options else None,
        torch.tensor([0.37]),
        torch.tensor([3.0]),
        torch.tensor([0.5]) if options else None,
        torch.zeros(1) if options else None,
        torch.tensor([0, 4, 4, NUM_ROWS]) if stochastic else None,
        torch.tensor([5, 6, 7]) if stochastic else None,
        torch.tensor([0, 8, 64]) if stochastic else None,
        int(kind),
        1e-8,
        0.9,
        0.999,
        0.5 if options else 0.0,
        6.0 if options else 0.0,
    ]


def check_update(arguments: list[Any], device: torch.device) -> None:
    """The states have the bits of the reference afterwards, and so has the weight under SGD.

    Under the others it may be off by one eps at the size of the largest element.
    """
    expected, result = moved(arguments, torch.device("cpu")), moved(arguments, device)
    rowwise_update_reference(RowUpdate(*expected))
    launch_rowwise_update(RowUpdate(*result))
    for actual, wanted in zip(result[1:3], expected[1:3], strict=True):
        if wanted is not None:
            assert_same_bits(actual, wanted)
    if arguments[18] == OptimizerKind.SGD:
        assert_same_bits(result[0], expected[0])
    else:
        band = torch.finfo(expected[0].dtype).eps * expected[0].abs().max().item()
        torch.testing.assert_close(result[0].cpu(), expected[0], rtol=0, atol=band)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.usefixtures("addresses")
def test_rowwise_update(kind: OptimizerKind, dtype: torch.dtype, device: torch.device) -> None:
    rows = random_rows(40, NUM_ROWS, seed=13)
    options = dtype != torch.float32
    check_update(update_arguments(rows, 64, kind, dtype, options), device)


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_rowwise_update_of_long_rows(kind: OptimizerKind, device: torch.device) -> None:
    rows = random_rows(9, NUM_ROWS, seed=13)
    # 1024 is a power of two, so that the mean over the columns does not round either.
    check_update(update_arguments(rows, 1024, kind, torch.float32, options=False), device)


@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize(
    "lengths",
    [
        (RUN_CHUNK,),
        (RUN_CHUNK - 1, 1),
        (1, RUN_CHUNK),
        (RUN_CHUNK + 1, 2 * RUN_CHUNK - 1, 3, 5 * RUN_CHUNK),
        (*[RUN_CHUNK] * 5, RUN_CHUNK // 2, 6 * RUN_CHUNK - 1),
        (7, RUN_CHUNK**2 + RUN_CHUNK + 5, RUN_CHUNK**2 - 1),
    ],
    ids=str,
)
@pytest.mark.usefixtures("addresses")
def test_rowwise_update_of_long_runs(
    lengths: tuple[int, ...], options: bool, device: torch.device
) -> None:
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(14)
    rows = torch.cat([rows, torch.full((5,), -1)])
    rows = rows[torch.randperm(rows.numel(), generator=generator)]
    check_update(update_arguments(rows, 8, OptimizerKind.SGD, torch.float32, options), device)


def test_rowwise_update_is_skipped(device: torch.device) -> None:
    rows = random_rows(2 * RUN_CHUNK, NUM_ROWS, seed=13)
    arguments = update_arguments(rows, 8, OptimizerKind.ADAM, torch.bfloat16, options=True)
    arguments[14] = torch.ones(1)
    changed = moved(arguments, device)
    launch_rowwise_update(RowUpdate(*changed))
    for actual, before in zip(changed[:3], arguments[:3], strict=True):
        assert_same_bits(actual, before)


def test_the_sum_of_a_run_does_not_depend_on_the_batch(device: torch.device) -> None:
    """The same occurrences of a row give the same bits, whatever stands before them."""
    generator = torch.Generator().manual_seed(15)
    num_ids = 3 * RUN_CHUNK + 17
    grad = torch.randn(num_ids, 8, generator=generator)
    results = []
    for num_others in (0, 1, RUN_CHUNK - 1):
        rows = torch.cat([torch.zeros(num_others), torch.ones(num_ids)]).long()
        arguments = update_arguments(rows, 8, OptimizerKind.SGD, torch.float32, options=False)
        arguments[8] = torch.cat([torch.zeros(num_others, 8), grad])
        arguments = moved(arguments, device)
        launch_rowwise_update(RowUpdate(*arguments))
        results.append(arguments[0][1])
    for result in results[1:]:
        assert_same_bits(result, results[0])
