"""The library's update of rows on a GPU, against the Triton kernels': the same bits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.row_updates import scalar
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.core.types import RUN_CHUNK, OptimizerKind
from torchembed.core.update_records import RowUpdate
from torchembed.ops.rowwise_update import RoundingKeys, RowGradients, UpdateRule, cuda
from torchembed.ops.rowwise_update.cuda import cuda_kernel
from torchembed.ops.segments import Runs, find_runs

pytest.importorskip("triton", reason="compares with Triton's kernel: triton is not installed")

from torchembed.triton_kernels.rowwise_update import launch_rowwise_update

pytestmark = pytest.mark.gpu

DIM = 128
NARROW_DIMS = (64, 96)
WIDE_DIMS = (256, 512)
DIMS_OF_16_BITS = (DIM, *WIDE_DIMS)
DIMS = (*NARROW_DIMS, DIM, *WIDE_DIMS)
HALVES = (torch.float16, torch.bfloat16)
KINDS = (
    OptimizerKind.ROWWISE_ADAGRAD,
    OptimizerKind.ADAGRAD,
    OptimizerKind.SGD,
    OptimizerKind.ADAM,
)


@pytest.fixture(autouse=True)
def library_updates(device: torch.device) -> None:
    if cuda_kernel() is None:
        pytest.skip("the C++ library was built without CUDA")


def launch(kernel: Callable[..., Any], weight: Tensor, rows: Tensor, **options: Any) -> list[Any]:
    """The kernel's result, then the weight and the states that it leaves."""
    options = {"kind": KINDS[0], "multiplier": None, "skip": None} | options
    num_rows, rule = weight.shape[0], UpdateRule(kind=options["kind"], **options.get("rule", {}))
    weight = weight.clone()
    shape = rule.state_shape(*weight.shape)
    states = [
        normal(*shape, seed=4 + n, device=weight.device).abs() for n in range(rule.num_states)
    ]
    gradients: RowGradients = options["gradients"]
    row_offsets, row_keys, first_columns = options.get("rounding") or (None, None, None)
    state0, state1 = [*states, None, None][:2]
    update = RowUpdate(
        weight,
        state0,
        state1,
        *find_runs(rows, num_rows),
        *gradients,
        scalar(0.1, weight.device),
        scalar(3.0, weight.device),
        options["multiplier"],
        options["skip"],
        row_offsets=row_offsets,
        row_keys=row_keys,
        first_columns=first_columns,
        optimizer=int(rule.kind),
        eps=rule.eps,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        max_gradient=rule.max_gradient,
    )
    return [kernel(update), weight, *states]


def check(
    rows: Tensor,
    num_rows: int,
    gradients: RowGradients,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    **options: Any,
) -> None:
    weight = normal(num_rows, gradients.grad.shape[1], seed=3, device=rows.device)
    weight = weight.mul_(size).to(dtype)
    kernel = cuda_kernel()
    assert kernel is not None
    for kind in KINDS:
        if not cuda._takes(weight, gradients.grad, kind):
            continue  # on this GPU Triton's kernel does
        found, expected = (
            launch(each, weight, rows, gradients=gradients, kind=kind, **options)
            for each in (kernel.launch, launch_rowwise_update)
        )
        assert found[0] is None
        for tensor, same in zip(found[1:], expected[1:], strict=True):
            assert_same_bits(tensor, same)


def skewed(num_ids: int, num_rows: int, device: torch.device) -> Tensor:
    """Rows of which some are hot, in no order, and a few missing."""
    generator = torch.Generator(device).manual_seed(num_ids)
    uniform = torch.rand(num_ids, generator=generator, device=device)
    rows = (uniform**3 * num_rows).long().clamp_max(num_rows - 1)
    rows[::37] = -1
    return rows


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pooled_gradients(grad_dtype: torch.dtype, dim: int, device: torch.device) -> None:
    num_ids, num_bags = 50_000, 10_000
    gradient_rows = (torch.arange(num_ids, device=device) * 7 % num_bags).int()
    grad = normal(num_bags, dim, seed=0, dtype=grad_dtype, device=device)
    rows = skewed(num_ids, 20_000, device).int()
    check(rows, 20_000, RowGradients(grad, gradient_rows))


def rounding_keys(num_rows: int, device: torch.device) -> RoundingKeys:
    """Those of three tables, of which the second one is empty."""
    offsets = torch.tensor([0, num_rows // 3, num_rows // 3, num_rows], device=device)
    keys = torch.tensor([17, -(2**60) + 5, 2**62 - 11], device=device)
    # Columns of four that share random bits are neighbours in a row, and in a part of one may not.
    return RoundingKeys(offsets, keys, torch.tensor([0, 256, 2**33 + 3], device=device))


@pytest.mark.parametrize("dim", DIMS_OF_16_BITS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_of_16_bits(
    dtype: torch.dtype, grad_dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    num_ids, num_bags, num_rows = 50_000, 10_000, 20_000
    gradient_rows = (torch.arange(num_ids, device=device) * 7 % num_bags).int()
    # Small steps, so that most elements are rounded from between two neighbours.
    grad = (normal(num_bags, dim, seed=0, device=device) * 1e-2).to(grad_dtype)
    rows = skewed(num_ids, num_rows, device).int()
    keys = rounding_keys(num_rows, device)
    for rounding in (keys, keys._replace(first_columns=None), None):
        check(rows, num_rows, RowGradients(grad, gradient_rows), dtype=dtype, rounding=rounding)
    scales = normal(num_ids, seed=1, device=device)
    for size in (1e-6, 6e4):  # subnormal numbers of float16, and its largest ones
        gradients = RowGradients(grad * size, gradient_rows, scales)
        check(rows, num_rows, gradients, dtype=dtype, rounding=keys, size=size)


@pytest.mark.parametrize("dim", DIMS_OF_16_BITS)
@pytest.mark.parametrize("dtype", HALVES)
def test_extreme_rows_of_16_bits(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    values = [0.0, -0.0, 1e-45, -1e-38, 1e-20, 3e19, -3e38, float("inf"), float("nan"), 1.0]
    grad = torch.tensor(values, device=device).repeat_interleave(dim).view(-1, dim)
    grad[:, 4:] = 1e-3
    rows = torch.arange(len(values), device=device)
    for rounding in (rounding_keys(len(values), device), None):
        check(rows, len(values), RowGradients(grad), dtype=dtype, rounding=rounding)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_every_option(grad_dtype: torch.dtype, dim: int, device: torch.device) -> None:
    num_ids, num_rows = 3_000, 700
    gradients = RowGradients(
        normal(num_ids, dim, seed=0, dtype=grad_dtype, device=device),
        torch.arange(num_ids, device=device).flip(0),
        normal(num_ids, seed=1, device=device),
    )
    check(
        skewed(num_ids, num_rows, device),
        num_rows,
        gradients,
        rule={"eps": 1e-6, "weight_decay": 0.05, "max_gradient": 1.5},
        multiplier=scalar(0.7, device),
    )


@pytest.mark.parametrize(
    "length",
    [1, 2, 3, 4, 5, 10, *(RUN_CHUNK**p + n for p in (1, 2) for n in (-1, 0, 1)), 41_024],
)
def test_runs_of_every_length(length: int, device: torch.device) -> None:
    rows = torch.arange(9, device=device).repeat_interleave(length)
    rows = torch.cat([rows, torch.full((length % 5 + 1,), 11, device=device)])
    for dtype, dim in itertools.product((torch.bfloat16, torch.float32), DIMS):
        grad = normal(rows.numel(), dim, seed=0, dtype=dtype, device=device)
        check(rows, 20, RowGradients(grad))
    keys = rounding_keys(20, device)
    for dim in (DIM, 256):
        grad = normal(rows.numel(), dim, seed=0, device=device)
        check(rows, 20, RowGradients(grad), dtype=torch.float16, rounding=keys)


@pytest.mark.parametrize("dim", NARROW_DIMS)
@pytest.mark.parametrize("seed", range(4))
def test_short_runs_of_unequal_lengths(seed: int, dim: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(3_000, generator=generator, device=device)
    # Most have one occurrence, and some as many as a run that is not divided.
    lengths = 1 + (uniform**8 * (RUN_CHUNK - 1)).long()
    rows = torch.arange(lengths.numel(), device=device).repeat_interleave(lengths)
    scales = normal(rows.numel(), seed=seed, device=device) if seed % 2 else None
    grad = normal(rows.numel(), dim, seed=0, device=device)
    check(rows, lengths.numel(), RowGradients(grad, None, scales))


def test_few_warps_for_many_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_num_blocks", lambda update: 1)
    hot = skewed(60_000, 500, device)
    for num_single in (300, 20_000):  # with long runs, and with many short ones
        rows = torch.cat([torch.arange(num_single, device=device), hot])
        for dim in (*NARROW_DIMS, DIM):
            grad = normal(rows.numel(), dim, seed=0, dtype=torch.bfloat16, device=device)
            check(rows, 20_000, RowGradients(grad))
        for dim in (DIM, 256):
            grad = normal(rows.numel(), dim, seed=0, device=device)
            check(rows, 20_000, RowGradients(grad), dtype=torch.bfloat16)


@pytest.mark.parametrize("num_blocks", [66, 110])
def test_wide_rows_on_part_of_the_gpu(
    num_blocks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_num_blocks", lambda update: num_blocks)
    rows = skewed(60_000, 20_000, device)
    for dtype in (torch.float32, torch.float16):
        check(rows, 20_000, RowGradients(normal(60_000, 256, seed=0, device=device)), dtype=dtype)


@pytest.mark.parametrize("dim", [*NARROW_DIMS, DIM])
def test_replays_of_a_graph(dim: int, device: torch.device) -> None:
    kernel = cuda_kernel()
    assert kernel is not None

    def replayed(update: RowUpdate) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = kernel.launch(update)
        graph.replay()
        graph.replay()
        return result

    def repeated(update: RowUpdate) -> None:
        launch_rowwise_update(update)
        launch_rowwise_update(update)

    rows, weight = skewed(60_000, 500, device), normal(500, dim, seed=3, device=device)
    gradients = RowGradients(normal(rows.numel(), dim, seed=0, device=device))
    launch(kernel.launch, weight, rows, gradients=gradients)  # a kernel loads outside of graphs
    found, expected = (
        launch(each, weight, rows, gradients=gradients) for each in (replayed, repeated)
    )
    assert found[0] is None
    for tensor, same in zip(found[1:], expected[1:], strict=True):
        assert_same_bits(tensor, same)


@pytest.mark.parametrize("dim", [*NARROW_DIMS, DIM])
def test_extreme_gradients(dim: int, device: torch.device) -> None:
    values = [0.0, -0.0, 1e-45, -1e-38, 1e-20, 3e19, -3e38, float("inf"), float("nan"), 1.0]
    grad = torch.tensor(values, device=device).repeat_interleave(dim).view(-1, dim)
    grad[:, 4:] = 1e-3
    check(torch.arange(len(values), device=device), len(values), RowGradients(grad))


@pytest.mark.parametrize("flag", [1.0, float("nan")])
def test_skips(flag: float, device: torch.device) -> None:
    for dim in DIMS:
        gradients = RowGradients(normal(100, dim, seed=0, device=device))
        for dtype in (torch.float32, torch.bfloat16):
            check(skewed(100, 20, device), 20, gradients, dtype=dtype, skip=scalar(flag, device))


def test_no_run_at_all(device: torch.device) -> None:
    for dim in DIMS:
        gradients = RowGradients(normal(50, dim, seed=0, device=device))
        for dtype in (torch.float32, torch.bfloat16):
            check(torch.full((50,), -1, device=device), 20, gradients, dtype=dtype)


def test_leaves_other_calls_to_triton(device: torch.device) -> None:
    kernel = cuda_kernel()
    assert kernel is not None
    rows = torch.tensor([1, 2], device=device)
    weight = normal(5, DIM, seed=0, device=device)
    grad = normal(2, DIM, seed=1, device=device)
    cases = []
    for dim, kind in ((32, KINDS[0]), (48, KINDS[0]), (64, OptimizerKind.ADAGRAD)):
        narrow = RowGradients(grad[:, :dim].contiguous())
        weight_of_dim = weight[:, :dim].contiguous()
        cases.append(launch(kernel.launch, weight_of_dim, rows, gradients=narrow, kind=kind))
    adam = OptimizerKind.ADAM
    cases.append(launch(kernel.launch, weight, rows, gradients=RowGradients(grad), kind=adam))
    of_16_bits = weight.bfloat16()
    for dim, dtype in ((64, torch.float32), (DIM, torch.float16)):
        gradients = RowGradients(grad[:, :dim].to(dtype).contiguous())
        weight_of_dim = of_16_bits[:, :dim].contiguous()
        cases.append(launch(kernel.launch, weight_of_dim, rows, gradients=gradients))
    assert [result for result, *_ in cases] == [NotImplemented] * len(cases)


def test_refuses_what_would_reach_past_memory(device: torch.device) -> None:
    update = torch.ops.torchembed_native.update_rows
    runs = find_runs(torch.tensor([0, 1, 2], device=device), 5)
    one = scalar(1.0, device)

    def call(weight: Tensor, state: Tensor, grad: Tensor, runs: Runs = runs) -> None:
        rowwise = int(OptimizerKind.ROWWISE_ADAGRAD)
        scalars = (one, *[None] * 6, rowwise, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0)
        update(weight, state, None, *runs, grad, None, None, *scalars)

    weight, state, grad = (
        torch.zeros(*shape, device=device) for shape in ((5, DIM), (5,), (3, DIM))
    )
    columns = "weight and grad must be contiguous and both have 128, 256 or 512 columns, or 64 "
    with pytest.raises(RuntimeError, match=columns):
        call(weight[:, :48].contiguous(), state, grad)
    with pytest.raises(RuntimeError, match=columns):
        call(weight, state, grad[:, ::2])
    with pytest.raises(RuntimeError, match="state0 must hold 5 elements, got 4"):
        call(weight, state[:4], grad)
    with pytest.raises(
        RuntimeError, match=r"chunk_runs must hold 0 elements \(one for each 32 ids\), got 1"
    ):
        call(weight, state, grad, runs._replace(chunk_runs=runs.num_runs))
