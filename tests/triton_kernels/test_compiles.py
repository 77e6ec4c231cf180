"""Every kernel compiles for an H100 as its launcher launches it, on a machine without a GPU.

The interpreter takes much that the compiler refuses; a GPU's real launches show the rest.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.support import lanes
from torchembed.core.cached_lookups import CachedLookup, line_bytes
from torchembed.core.copies.rectangles import RectangleCopies, RectangleCopy
from torchembed.core.hash_tables import KeyErasure, KeyInsertion, SlotTouch
from torchembed.core.row_caches import PlaceExchange, RowMove, SlotClaim
from torchembed.core.types import RUN_CHUNK, OptimizerKind
from torchembed.core.update_records import DenseUpdate, RowInitialization, RowUpdate
from torchembed.ops.hash_table import HashTables, Policy, TableShape, empty_hash_tables
from torchembed.ops.row_cache import empty_row_cache
from torchembed.triton_kernels import (
    binary_cross_entropy,
    cached_lookup,
    claim_slots,
    column_sums,
    columns,
    cross,
    dense_update,
    erase_keys,
    exchange_places,
    find_cached,
    find_slots,
    gradient_map,
    id_shares,
    initialize_rows,
    insert_keys,
    jagged,
    large_cached_lookup,
    linear,
    linearize_ids,
    low_rank_cross,
    move_rows,
    pointwise_attention,
    pooled_lookup,
    push,
    row_blocks,
    row_codec,
    rowwise_update,
    segments,
    sequence_lookup,
    touch_slots,
)

NUM_IDS, BATCH_SIZE, NUM_ROWS = 256, 64, 32


@pytest.fixture
def kernels_can_run() -> None:
    if lanes.is_interpreted() or torch.cuda.is_available():
        pytest.skip("kernels are interpreted, or compiled by real launches on this machine's GPU")


class _AbsentH100:
    """The answers that the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch, kernels_can_run: None) -> dict[str, str]:
    """Launches compile instead, and leave the kernel's PTX here under its name."""
    compiled: dict[str, str] = {}
    launch = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        result = launch(kernel, *args, warmup=True, **kwargs)
        assert result.asm["cubin"]
        compiled[kernel.fn.__name__] = result.asm["ptx"]
        return result

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", _AbsentH100())
    return compiled


def ids(dtype: torch.dtype = torch.int64, count: int = NUM_IDS) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def launch_linearize_ids(offsets: Tensor | None, hotness: list[int]) -> None:
    tables = torch.zeros(2, dtype=torch.int64)
    for dtype, on_bad_id in ((torch.int32, 0), (torch.int64, 1)):
        linearize_ids.launch_linearize_ids(
            ids(dtype), offsets, hotness, tables, tables, BATCH_SIZE, on_bad_id, dtype
        )
        bounds = None if offsets is None else offsets[::BATCH_SIZE]
        location = ids(count=2 if bounds is None else 4)
        linearize_ids.launch_locate_bad_id(ids(dtype), ids(count=1), bounds, location)


def launch_id_shares(dtype: torch.dtype) -> None:
    of_features = torch.ones(2, dtype=torch.int64)
    id_shares.launch_shares_of_ids(ids(dtype), 3)
    id_shares.launch_are_in_share(ids(dtype), [1, 3], of_features, of_features, BATCH_SIZE)


def launch_row_codec(dim: int, dtype: torch.dtype) -> None:
    codes = row_codec.launch_encode_rows(torch.zeros(NUM_ROWS, dim, dtype=dtype))
    row_codec.launch_decode_rows(codes, dtype)
    row_codec.launch_scaled_rows(torch.zeros(NUM_ROWS, dim, dtype=dtype))


def launch_pooled_lookup(
    offsets: Tensor | None, hotness: list[int], dim: int, dtype: torch.dtype, mean: bool
) -> None:
    weight, grad = torch.zeros(NUM_ROWS, dim, dtype=dtype), torch.zeros(BATCH_SIZE, 2, dim)
    weights = torch.zeros(NUM_IDS, dtype=dtype) if mean else None
    grouping = (offsets, hotness)
    sizes = (2, BATCH_SIZE, mean)
    pooled_lookup.launch_pooled_lookup_forward(weight, ids(), *grouping, weights, *sizes, dtype)
    gradient_map.launch_pooled_lookup_gradient_map(ids(), *grouping, weights, *sizes)
    pooled_lookup.launch_pooled_lookup_weights_backward(grad, weight, ids(), *grouping, mean)


def launch_update(kind: OptimizerKind, dim: int, dtype: torch.dtype, options: bool) -> None:
    state_shape = (NUM_ROWS,) if kind is OptimizerKind.ROWWISE_ADAGRAD else (NUM_ROWS, dim)
    one = torch.ones(1)
    rowwise_update.launch_rowwise_update(
        RowUpdate(
            torch.zeros(NUM_ROWS, dim, dtype=dtype),
            None if kind is OptimizerKind.SGD else torch.zeros(state_shape),
            torch.zeros(state_shape) if kind is OptimizerKind.ADAM else None,
            ids(),
            ids(torch.int32, NUM_IDS + 1),
            ids(torch.int32),
            torch.ones(1, dtype=torch.int32),
            ids(torch.int32, NUM_IDS // RUN_CHUNK),
            torch.zeros(NUM_IDS, dim, dtype=dtype),
            ids(torch.int32) if options else None,
            torch.zeros(NUM_IDS) if options else None,
            one,
            one,
            one if options else None,
            one if options else None,
            torch.zeros(3, dtype=torch.int64) if options else None,
            torch.zeros(2, dtype=torch.int64) if options else None,
            torch.zeros(2, dtype=torch.int64) if options else None,
            int(kind),
            1e-8,
            0.9,
            0.999,
            0.1 if options else 0.0,
            1.0 if options else 0.0,
        )
    )


def launch_permute(values: Tensor, weights: Tensor | None) -> None:
    arrangement = ([1, 0], 2, BATCH_SIZE)
    jagged.launch_permute_features_forward(values, OFFSETS, weights, *arrangement, NUM_IDS)
    jagged.launch_permute_features_backward(
        torch.zeros(NUM_IDS), OFFSETS, OFFSETS, *arrangement, NUM_IDS
    )


def launch_bucketize(num_buckets: int, weights: Tensor | None) -> None:
    boundaries = torch.zeros(2, num_buckets + 1, dtype=torch.int64)
    jagged.launch_bucketize_rows(ids(), OFFSETS, weights, boundaries, BATCH_SIZE)


def launch_cross(dtype: torch.dtype, num_columns: int, x_is_x0: bool) -> None:
    x, bias = torch.zeros(BATCH_SIZE, num_columns, dtype=dtype), torch.zeros(num_columns)
    cross.launch_cross_epilogue_forward(x, x, bias, x)
    cross.launch_cross_epilogue_backward(x, x, x, bias, x_is_x0)


def launch_low_rank_cross(dtype: torch.dtype, num_columns: int, rank: int, num_rows: int) -> None:
    x0, x = torch.zeros(2, num_rows, num_columns, dtype=dtype)
    h = torch.zeros(num_rows, rank, dtype=dtype)
    u, bias = torch.zeros(num_columns, rank, dtype=dtype), torch.zeros(num_columns, dtype=dtype)
    for later in (x0, x):
        low_rank_cross.launch_low_rank_cross_forward(x0, h, u, bias, later)
    low_rank_cross.launch_low_rank_cross_scale(x, x0, bias)
    v = u.t().contiguous()
    low_rank_cross.launch_low_rank_cross_backward(x, h, v, x0, bias)
    widths = [24, num_columns - 24]
    low_rank_cross.launch_low_rank_cross_input_backward(h, v, [x] * 3, [x0] * 3, widths)


def launch_linear(num_rows: int) -> None:
    x = torch.zeros(num_rows, 24, dtype=torch.bfloat16)
    linear.launch_linear_relu_backward(x, x, x[0])
    linear.launch_linear_relu_backward(x, x, torch.zeros(-(-len(x) // 128), x.shape[1]))
    column_sums.sum_partials(torch.zeros(3, x.shape[1]), x[0])
    linear.launch_sum_rows(x, x[0])
    grad = linear.launch_linear_to_one_forward(x, x[:1], x[0, :1])
    linear.launch_linear_to_one_backward(grad, x, x[:1], x[:1], x[0, :1])


def launch_dense_update(kind: OptimizerKind, options: bool) -> None:
    weight, one = torch.zeros(5000), torch.ones(1)
    low = torch.zeros(5000, dtype=torch.bfloat16)
    states = [None if kind is OptimizerKind.SGD else weight.clone()]
    states.append(weight.clone() if kind is OptimizerKind.ADAM else None)
    extras = (one, one) if options else (None, None)
    numbers = (int(kind), 1e-8, 0.9, 0.0, 0.1 if options else 0.0)
    rounded, grad = (low, low.clone()) if options else (None, weight.clone())
    bounds = [0, 1000, 1024, 5000]
    dense_update.launch_dense_update(
        DenseUpdate(weight, *states, rounded, grad, one, one, *extras, bounds, *numbers)
    )


def launch_binary_cross_entropy(dtype: torch.dtype) -> None:
    logits, labels = torch.zeros(9000, dtype=dtype), torch.zeros(9000)
    binary_cross_entropy.launch_binary_cross_entropy_forward(logits, labels)
    binary_cross_entropy.launch_binary_cross_entropy_backward(labels[:1], logits, labels)


def launch_push(dtype: torch.dtype, wire: torch.dtype, width: int) -> None:
    """All kernels of an exchange of two ranks."""
    addresses, state, buffer = ids(count=2), ids(torch.int32, 2), torch.zeros(2, 1 << 20).to(wire)
    source = torch.zeros(BATCH_SIZE, 4 * width, dtype=dtype)
    weight = torch.zeros(NUM_ROWS, width, dtype=dtype)
    copies = RectangleCopies(
        [RectangleCopy(1, BATCH_SIZE, width, 0, width, 0, 2 * width)] * 4, torch.device("cpu")
    )
    bounds = copies.numbers, copies.max_rows, copies.max_columns, copies.vector
    to = [buffer, buffer], addresses, state
    pooled_lookup.launch_push_pooled_lookup(
        weight, ids(), None, [1, 3], None, 2, BATCH_SIZE, *bounds, *to
    )
    push.launch_push_rectangles(source, *bounds, *to, 0.25)
    push.launch_push_barrier([state, state], addresses, state, state, 1, 1.0)
    push.launch_collect_rectangles(buffer, state, 2 * width, *bounds, 1, source)
    push.launch_collect_rectangles(buffer, state, 2 * width, *bounds, 2, source)
    push.launch_copy_rectangles(source, *bounds, source)
    push.launch_push_mean(buffer, state, *to, 1 << 10, 1 << 10, 1)


def launch_columns(width: int, dtype: torch.dtype) -> None:
    parts = [torch.zeros(BATCH_SIZE, width, dtype=dtype) for _ in range(2)]
    joined = columns.launch_join_columns(parts, [width, 0], [width, width], 2 * width)
    columns.launch_split_columns(joined, [width, 0], [width, width], [width, width])


def launch_hash_tables(policy: Policy, options: bool) -> None:
    tables: HashTables = empty_hash_tables([TableShape(1, 2, 128)], policy)
    one, flag = ids(count=1), torch.ones(1, dtype=torch.bool)
    number = one if policy is Policy.EPOCH_LFU else None
    given = ids() if policy is Policy.CALLER else None
    use, is_trained = (int(policy), one, number), flag if options else None
    state = (tables.touched, tables.scores)
    numbers = ids(torch.int32)
    held = (tables.digests, tables.keys)
    slots = find_slots.launch_find_slots(ids(), numbers, *held, tables.geometry)
    touch_slots.launch_touch_slots(
        SlotTouch(slots, numbers, *use, given, is_trained, *state, tables.counters)
    )
    insert_keys.launch_insert_keys(
        KeyInsertion(
            ids(),
            numbers,
            ids(),
            ids(torch.bool) if options else None,
            *use,
            one,
            given,
            is_trained,
            *held,
            *state,
            tables.geometry,
            tables.counters,
        )
    )
    erase_keys.launch_erase_keys(
        KeyErasure(ids(), numbers, one, *held, *state, tables.geometry, tables.counters)
    )


def launch_cached_lookup(dtype: torch.dtype, dim: int, options: bool) -> None:
    shape = TableShape(1, 2, 128, 1)
    tables = empty_hash_tables([shape], Policy.LRU)
    lines = torch.zeros(shape.num_rows, line_bytes(dtype, dim), dtype=torch.uint8)
    copies = torch.zeros(shape.num_rows, dtype=torch.int32)
    call = CachedLookup(
        ids(),
        ids(torch.int32),
        tables.digests,
        tables.keys,
        tables.geometry,
        lines,
        dtype,
        dim,
        options,
        lines if options else None,
        copies if options else None,
        tables.touched if options else None,
        ids(count=1) if options else None,
        tables.counters if options else None,
        ids(count=1),
    )
    cached_lookup.launch_cached_lookup(call)
    large_cached_lookup.launch_large_cached_lookup(
        call._replace(reads=True, copies=None, copy_of_line=None)
    )
    large_cached_lookup.launch_large_cached_lookup(call)


def launch_initialize_rows(dim: int, dtype: torch.dtype, options: bool) -> None:
    states = (torch.zeros(NUM_ROWS, dim), torch.zeros(NUM_ROWS)) if options else (None, None)
    initialize_rows.launch_initialize_rows(
        RowInitialization(
            torch.zeros(NUM_ROWS, dim, dtype=dtype),
            *states,
            ids(),
            ids(),
            ids(torch.int32),
            ids(count=1) if options else None,
            ids(count=2),
            ids(torch.int32, 2),
            torch.zeros(2, 2),
            ids(count=2) if options else None,
            0.0,
        )
    )


def launch_row_cache(dim: int, dtype: torch.dtype, is_trained: Tensor | None) -> None:
    cache, one = empty_row_cache(NUM_ROWS, 8), ids(count=1)
    num_rows = None if is_trained is None else one.int()
    for rows in (ids(), ids(torch.int32)):
        slots = find_cached.launch_find_cached(cache.slot_of_row, rows, num_rows, -1)
        claim = SlotClaim(rows, one.int(), one, one, is_trained, *cache)
        *moves, _ = claim_slots.launch_claim_slots(claim)
    exchange_places.launch_exchange_places(PlaceExchange(*moves, ids(torch.int32, NUM_ROWS)))
    shapes = [((dim,), dtype), ((dim,), torch.float32), ((), torch.float32)]
    cached, stored = (
        [torch.zeros(num, *shape, dtype=of) for shape, of in shapes] for num in (8, NUM_ROWS)
    )
    move_rows.launch_move_rows(RowMove(*moves, cached, stored))
    move_rows.launch_read_rows(cached[0], stored[0], slots, rows)


def launch_pointwise_attention(dim: int, dtype: torch.dtype, has_times: bool) -> None:
    query, key, value = torch.zeros(3, NUM_IDS, 2, dim, dtype=dtype).unbind()
    of_times = (torch.zeros(128), ids(), ids()) if has_times else (None, None, None)
    others = (OFFSETS, torch.zeros(50), *of_times)
    pointwise_attention.launch_pointwise_attention_forward(query, key, value, *others)
    pointwise_attention.launch_pointwise_attention_backward(query, query, key, value, *others)


OFFSETS = torch.arange(2 * BATCH_SIZE + 1) * 2
LAUNCHES: dict[str, Callable[[], object]] = {
    "linearize jagged": lambda: launch_linearize_ids(OFFSETS, []),
    "linearize fixed": lambda: launch_linearize_ids(None, [1, 3]),
    "shares": lambda: launch_id_shares(torch.int64),
    "row codec": lambda: launch_row_codec(128, torch.float32),
    "row codec of odd rows": lambda: launch_row_codec(13, torch.bfloat16),
    "shares of int32": lambda: launch_id_shares(torch.int32),
    "find runs": lambda: segments.launch_find_runs(ids(), NUM_ROWS),
    "find one run": lambda: segments.launch_find_runs(ids(count=1), 2**40),
    "sequence": lambda: sequence_lookup.launch_sequence_lookup_forward(
        torch.zeros(NUM_ROWS, 24, dtype=torch.float16), ids(), torch.bfloat16
    ),
    "pooled jagged": lambda: launch_pooled_lookup(OFFSETS, [], 128, torch.bfloat16, True),
    "pooled fixed": lambda: launch_pooled_lookup(None, [1, 3], 1000, torch.float32, False),
    "sgd": lambda: launch_update(OptimizerKind.SGD, 128, torch.float32, False),
    "adagrad": lambda: launch_update(OptimizerKind.ADAGRAD, 1, torch.float16, True),
    "rowwise adagrad": lambda: launch_update(
        OptimizerKind.ROWWISE_ADAGRAD, 128, torch.bfloat16, True
    ),
    "rowwise adagrad of long rows": lambda: launch_update(
        OptimizerKind.ROWWISE_ADAGRAD, 2000, torch.float32, False
    ),
    "adam": lambda: launch_update(OptimizerKind.ADAM, 100, torch.float16, True),
    "initialize rows": lambda: launch_initialize_rows(128, torch.float32, True),
    "initialize long rows": lambda: launch_initialize_rows(3000, torch.bfloat16, False),
    "cached lookups of float32": lambda: launch_cached_lookup(torch.float32, 128, True),
    "cached lookups of float8": lambda: launch_cached_lookup(torch.float8_e4m3fn, 130, True),
    "cached lookups of int8": lambda: launch_cached_lookup(torch.int8, 64, True),
    "cached lookups without rows": lambda: launch_cached_lookup(torch.bfloat16, 64, False),
    "hash tables by last use": lambda: launch_hash_tables(Policy.LRU, True),
    "hash tables by frequency": lambda: launch_hash_tables(Policy.LFU, False),
    "hash tables by epoch and frequency": lambda: launch_hash_tables(Policy.EPOCH_LFU, True),
    "hash tables by scores of the caller": lambda: launch_hash_tables(Policy.CALLER, False),
    "row cache": lambda: launch_row_cache(128, torch.float32, torch.ones(1, dtype=torch.bool)),
    "row cache of odd columns": lambda: launch_row_cache(3000, torch.float16, None),
    "permute": lambda: launch_permute(ids(), torch.zeros(NUM_IDS, dtype=torch.bfloat16)),
    "permute int32": lambda: launch_permute(ids(torch.int32), None),
    "bucketize": lambda: launch_bucketize(8, torch.zeros(NUM_IDS, dtype=torch.float16)),
    "bucketize into one": lambda: launch_bucketize(1, None),
    "cross": lambda: launch_cross(torch.bfloat16, 432, False),
    "first cross": lambda: launch_cross(torch.float32, 7, True),
    "low-rank cross": lambda: launch_low_rank_cross(torch.bfloat16, 432, 512, 2048),
    "low-rank cross of few": lambda: launch_low_rank_cross(torch.float16, 100, 7, 64),
    "low-rank cross in float32": lambda: launch_low_rank_cross(torch.float32, 100, 7, 64),
    "linear of few": lambda: launch_linear(64),
    "linear": lambda: launch_linear(4096),
    "dense sgd": lambda: launch_dense_update(OptimizerKind.SGD, False),
    "dense adagrad": lambda: launch_dense_update(OptimizerKind.ADAGRAD, True),
    "dense adam": lambda: launch_dense_update(OptimizerKind.ADAM, True),
    "push": lambda: launch_push(torch.bfloat16, torch.bfloat16, 128),
    "push of odd columns": lambda: launch_push(torch.float32, torch.float16, 5),
    "columns": lambda: launch_columns(128, torch.bfloat16),
    "pointwise attention": lambda: launch_pointwise_attention(50, torch.float32, False),
    "pointwise attention with times": lambda: launch_pointwise_attention(64, torch.bfloat16, True),
    "pointwise attention of wide heads": lambda: launch_pointwise_attention(
        512, torch.float32, True
    ),
    "log loss": lambda: launch_binary_cross_entropy(torch.bfloat16),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles(name: str, ptx: dict[str, str]) -> None:
    LAUNCHES[name]()
    assert ptx


def test_compiles_with_wide_addresses(ptx: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "NARROW_LIMIT", 0)
    for name in ("linearize fixed", "find runs", "pooled jagged", "adam", "cross"):
        LAUNCHES[name]()
    launch_pointwise_attention(64, torch.bfloat16, True)
    assert len(ptx) == 16


def test_cross_products_are_on_tensor_cores_and_fit_twice(ptx: dict[str, str]) -> None:
    launch_low_rank_cross(torch.bfloat16, 3456, 512, 8192)
    for name in ("forward", "backward", "input_backward"):
        text = ptx[f"_low_rank_cross_{name}_kernel"]
        assert "wgmma.mma_async" in text
        assert re.search(r"ld\.global\S*\.v4\.b32", text)
        assert not re.search(r"[ls][dt]\.local", text)


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """The precision of float32 products on a GPU."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


def test_products_of_attention_are_as_precise_as_torch_is_set_to(
    precision: str, ptx: dict[str, str]
) -> None:
    launch_pointwise_attention(64, torch.float32, True)
    assert len(ptx) == 3
    for text in ptx.values():
        assert ("tf32" in text) == (precision == "tf32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pushes_are_16_bytes_at_a_time(dtype: torch.dtype, ptx: dict[str, str]) -> None:
    launch_push(dtype, dtype, 128)
    for name in ("_copy_kernel", "_mean_kernel", "_pooled_lookup_forward_kernel"):
        assert re.search(r"st\.global\S*\.v4\.b32", ptx[name])
    assert "atom.global.sys.release" in ptx["_barrier_kernel"]
    assert "atom.global.sys.acquire" in ptx["_barrier_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_are_read_and_written_16_bytes_at_a_time(
    dim: int, dtype: torch.dtype, ptx: dict[str, str]
) -> None:
    weight = torch.zeros(NUM_ROWS, dim, dtype=dtype)
    sequence_lookup.launch_sequence_lookup_forward(weight, ids(), dtype)
    pooled_lookup.launch_pooled_lookup_forward(
        weight, ids(), OFFSETS, [], None, 2, BATCH_SIZE, False, dtype
    )
    launch_update(OptimizerKind.SGD, dim, dtype, False)
    launch_row_cache(dim, dtype, None)
    for name in (
        *("sequence_lookup_forward", "pooled_lookup_forward", "rowwise_update"),
        *("move_rows", "read_rows"),
    ):
        text = ptx[f"_{name}_kernel"]
        assert re.search(r"ld\.global\S*\.v4\.b32", text)
        assert re.search(r"st\.global\S*\.v4\.b32", text)
        assert not re.search(r"[ls][dt]\.local", text)


def test_moves_wait_for_a_link_with_many_accesses(ptx: dict[str, str]) -> None:
    launch_row_cache(128, torch.float32, None)
    text = ptx["_move_rows_kernel"]
    # The two matrices of this width: four accesses of 16 bytes each, in each direction.
    for access in (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"):
        assert len(re.findall(access, text)) >= 16


def test_lines_of_large_lookups_are_read_16_bytes_at_a_time(ptx: dict[str, str]) -> None:
    launch_cached_lookup(torch.float32, 128, True)
    text = ptx["_large_cached_lookup_read_kernel"]
    # Four of each by programs that read from the host, and by those that read from the device.
    for access in (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"):
        assert len(re.findall(access, text)) >= 8
    assert not re.search(r"[ls][dt]\.local", text)


@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.float32), (64, torch.float16)])
def test_warps_that_pool_wide_rows_alone(
    dim: int, dtype: torch.dtype, ptx: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_lookup, "_FEW_BAGS", 0)
    monkeypatch.setattr(pooled_lookup, "_MANY_IDS_OF_BAG", 0)
    weight = torch.zeros(NUM_ROWS, dim, dtype=dtype)
    pooled_lookup.launch_pooled_lookup_forward(
        weight, ids(), OFFSETS, [], None, 2, BATCH_SIZE, False, dtype
    )
    text = ptx["_pooled_lookup_forward_kernel"]
    assert re.search(r"ld\.global\S*\.v4\.b32", text)
    assert ".reqntid 32" in text
    assert "bar.sync" not in text
    assert not re.search(r"[ls][dt]\.local", text)


def test_parts_of_a_weight_are_updated_16_bytes_at_a_time(ptx: dict[str, str]) -> None:
    launch_dense_update(OptimizerKind.ADAGRAD, True)
    for access in (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"):
        # Weight, state, gradient and copy: 8 elements of 4 or 2 bytes.
        assert len(re.findall(access, ptx["_dense_update_kernel"])) >= 5


def test_digests_are_read_16_at_a_time(ptx: dict[str, str]) -> None:
    launch_hash_tables(Policy.LRU, False)
    # Two accesses for each of two buckets.
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx["_find_slots_kernel"])) >= 4
    assert ".reqntid 32" in ptx["_insert_keys_kernel"]
    for name in ("find_slots", "insert_keys"):
        assert not re.search(r"[ls][dt]\.local", ptx[f"_{name}_kernel"])
