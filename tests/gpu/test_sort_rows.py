"""The library's sort of rows on a GPU, against torch's."""

import pytest
import torch
from torch import Tensor

from tests.support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

# Of few ids, of some and of many.
TILE, SOME_TILE, LARGE_TILE = (512 * items for items in (2, 7, 14))
SOME_IDS, MANY_IDS = 2**17, 2**20


@pytest.fixture(autouse=True)
def library_sorts(device: torch.device) -> None:
    if not hasattr(torch.ops.torchembed_native, "sort_rows"):
        pytest.skip("the C++ library was built without CUDA")


def check(rows: Tensor, num_rows: int) -> None:
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    sorted_rows, order = torch.ops.torchembed_native.sort_rows(rows, num_rows, None, stream)
    expected_rows, expected_order = torch.sort(rows, stable=True)
    assert_same_bits(sorted_rows, expected_rows.int())
    assert_same_bits(order, expected_order.int())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "num_ids",
    [
        *(1, 2, 31, 33, 511, 513, TILE - 1, TILE, TILE + 1, 100_003),
        *(SOME_IDS - 1, SOME_IDS, 37 * SOME_TILE, 37 * SOME_TILE + 1),
        *(MANY_IDS - 1, MANY_IDS, 147 * LARGE_TILE, 147 * LARGE_TILE + 1),
    ],
)
def test_sorts_as_torch_does(num_ids: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(num_ids)
    # One bit, one digit and one row past it, two digits, three, and all four.
    for num_rows in (1, 2, 511, 512, 2**18 - 1, 2**18, 2**27, 2**31 - 1):
        rows = torch.randint(-1, num_rows, (num_ids,), generator=generator, device=device)
        rows[: num_ids // 3] = rows[0].clone()  # a long run, and stable within it
        rows[-1] = num_rows - 1
        check(rows.to(dtype), num_rows)


@pytest.mark.parametrize("num_used", [0, 1, TILE + 1, SOME_IDS, SOME_IDS + 77])
def test_sorts_the_first_so_many(num_used: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(num_used)
    rows = torch.randint(-1, 2**20, (SOME_IDS + 77,), generator=generator, device=device)
    stream = torch.cuda.current_stream(rows.device).cuda_stream
    count = torch.tensor([num_used], device=device)
    sorted_rows, order = torch.ops.torchembed_native.sort_rows(rows, 2**20, count, stream)
    expected_rows, expected_order = torch.sort(rows[:num_used], stable=True)
    assert_same_bits(sorted_rows[:num_used], expected_rows.int())
    assert_same_bits(order[:num_used], expected_order.int())


def test_all_equal_ascending_and_descending(device: torch.device) -> None:
    ascending = torch.arange(MANY_IDS + 5, device=device)
    check(ascending, ascending.numel())
    check(ascending.flip(0).contiguous(), ascending.numel())
    check(torch.full_like(ascending, 7), 8)
    check(torch.full_like(ascending, -1), 8)


def test_rejects_what_it_cannot_sort(device: torch.device) -> None:
    sort = torch.ops.torchembed_native.sort_rows
    rows = torch.zeros(4, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="rows must be int32 or int64, got Float"):
        sort(rows.float(), 5, None, 0)
    with pytest.raises(RuntimeError, match="rows must be contiguous"):
        sort(rows[::2], 5, None, 0)
    with pytest.raises(RuntimeError, match="rows must hold between 1 and"):
        sort(rows[:0], 5, None, 0)
    with pytest.raises(RuntimeError, match=r"num_rows must be less than 2\*\*31, got 2147483648"):
        sort(rows, 2**31, None, 0)
    with pytest.raises(RuntimeError, match="count must be one int64 on the GPU"):
        sort(rows, 5, torch.ones(1, dtype=torch.int64), 0)
