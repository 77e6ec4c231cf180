"""Moves of rows between a cache and where they are stored, and reads from either."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.row_cache_model import row_moves
from torchembed.ops.row_cache import RowMoves, move_rows, read_rows


def test_worked_example_of_row_moves(device: torch.device) -> None:
    cached = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    stored = torch.tensor([[5.0, 6.0], [7.0, 8.0]], device=device)
    move_rows(row_moves(device, (1, 0, 1)), [cached], [stored])
    assert cached.tolist() == [[1, 2], [7, 8]]
    assert stored.tolist() == [[3, 4], [7, 8]]


def test_slot_and_row_of_one_move_are_exchanged(device: torch.device) -> None:
    cached = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    stored = torch.tensor([[5.0, 6.0], [7.0, 8.0]], device=device)
    move_rows(row_moves(device, (0, 1, 1), (1, 0, -1)), [cached], [stored])
    assert cached.tolist() == [[7, 8], [3, 4]]
    assert stored.tolist() == [[3, 4], [1, 2]]


def bits(*shape: int, seed: int) -> Tensor:
    """Bytes of every kind, those of NaN with a payload too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=generator).to(torch.uint8)


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` in memory of the host that ``device`` may access."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def in_lines(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of ``tensors``, whose rows lie side by side, at multiples of 4 bytes."""
    sizes = [-(-tensor.shape[1:].numel() * tensor.itemsize // 4) * 4 for tensor in tensors]
    lines = on_host(torch.zeros(len(tensors[0]), sum(sizes), dtype=torch.uint8), device)
    made = []
    for tensor, part in zip(tensors, lines.split(sizes, dim=1), strict=True):
        columns = part.view(tensor.dtype)
        made.append(columns[:, : tensor.shape[1]] if tensor.dim() > 1 else columns[:, 0])
        made[-1].copy_(tensor)
    return made


@pytest.mark.parametrize("are_lines", [False, True], ids=["apart", "lines"])
@pytest.mark.parametrize("dim", [1, 3, 16, 200, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_and_their_states_move_together(
    dtype: torch.dtype, dim: int, are_lines: bool, device: torch.device
) -> None:
    """Bit by bit, whatever stands in them."""
    num_slots, num_rows = 7, 11
    shapes = [(dim, dtype), (dim, torch.float32), (None, torch.float32)]

    def tensors(num: int) -> list[Tensor]:
        made = []
        for seed, (columns, of) in enumerate(shapes):
            width = (1 if columns is None else columns) * of.itemsize
            whole = bits(num, width, seed=seed + num).view(of)
            made.append(whole[:, 0].clone() if columns is None else whole)
        return made

    given = [(4, 2, 7), (0, -1, 3), (6, 10, -1), (1, -1, -1), (5, 0, 8)]
    cached, stored = tensors(num_slots), tensors(num_rows)
    expected_cached = [tensor.clone() for tensor in cached]
    expected_stored = [tensor.clone() for tensor in stored]
    for slot, written, read in given:
        for one, other in zip(expected_cached, expected_stored, strict=True):
            if written >= 0:
                other[written] = one[slot]
            if read >= 0:
                one[slot] = other[read]
    on_device = [tensor.to(device) for tensor in cached]
    host = in_lines(stored, device) if are_lines else [on_host(tensor, device) for tensor in stored]
    move_rows(row_moves(device, *given), on_device, host)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for tensor, expected in zip(
        [*on_device, *host], [*expected_cached, *expected_stored], strict=True
    ):
        found = tensor.cpu().contiguous()
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_no_row_moves(device: torch.device) -> None:
    cached, stored = torch.ones(2, 3, device=device), torch.zeros(4, 3, device=device)
    nothing = row_moves(device)
    without_capacity = RowMoves(
        nothing.slots[:0], nothing.written_rows[:0], nothing.read_rows[:0], nothing.count
    )
    for given in (nothing, without_capacity):
        move_rows(given, [cached], [stored])
    move_rows(
        row_moves(device, (0, 1, 2)), [cached[:, :0].contiguous()], [stored[:, :0].contiguous()]
    )
    assert cached.tolist() == [[1] * 3] * 2
    assert stored.tolist() == [[0] * 3] * 4


@pytest.mark.parametrize("dim", [1, 3, 16, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
def test_rows_are_read_where_they_are(
    dtype: torch.dtype, rows_dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    cached, stored = (bits(num, dim * dtype.itemsize, seed=num).view(dtype) for num in (3, 9))
    slots, rows = [-1, 2, 0, -1, -1, 2], [8, 5, 1, -1, 0, 5]
    zeros = torch.zeros(dim, dtype=dtype)
    expected = torch.stack([stored[8], cached[2], cached[0], zeros, stored[0], cached[2]])
    given = [torch.tensor(numbers, dtype=rows_dtype, device=device) for numbers in (slots, rows)]
    of_lines, _ = in_lines([stored, torch.zeros(9)], device)
    for held in (on_host(stored, device), of_lines):
        out = read_rows(cached.to(device).requires_grad_(), held, *given)
        assert (out.device.type, out.requires_grad) == (device.type, False)
        assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert read_rows(cached.to(device), held, given[0][:0], given[1][:0]).shape == (0, dim)


def test_stored_rows_in_memory_of_the_host_fit_a_gpu() -> None:
    """In tracing, where nothing says whether memory is pinned."""
    with FakeTensorMode():
        gpu = torch.device("cuda")
        stored, cached = torch.empty(9, 4), torch.empty(3, 4, device=gpu)
        rows = torch.empty(5, dtype=torch.int64, device=gpu)
        out = read_rows(cached, stored, rows, rows)
        assert (out.device.type, tuple(out.shape)) == ("cuda", (5, 4))
        numbers = torch.empty(3, dtype=torch.int64, device=gpu)
        count = torch.empty(1, dtype=torch.int64, device=gpu)
        move_rows(RowMoves(numbers.int(), numbers, numbers, count), [cached], [stored])
        ids, on_gpu = torch.empty(5, dtype=torch.int64), torch.empty(9, 4, device=gpu)
        with pytest.raises(ValueError, match=r"^stored must be on the device of rows, cpu, or in "):
            read_rows(torch.empty(3, 4), on_gpu, ids, ids)
